"""`agent.constrain_tool_calls`: a model that writes anything still calls tools as they want to be called."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from retrograd.agent.constrained import CallConstraints
from retrograd.agent.play import Played
from retrograd.agent.stage import Part
from retrograd.assembly import assemble
from retrograd.cli.document import open_document
from retrograd.engine import Completion, TrainingSequence
from retrograd.testing.vocabulary import byte_level_vocabulary
from retrograd_hookspecs import (
    Component,
    ConfigError,
    NoConfig,
    RolloutError,
    StepResult,
    ToolCall,
    ToolSpec,
    hookimpl,
)
from retrograd_plugins.chat_formats.hermes import HermesFormat
from retrograd_plugins.chat_formats.qwen3_coder import Qwen3CoderFormat
from retrograd_plugins.constraints.llguidance import LlguidanceEngine
from retrograd_plugins.samplers.default import DefaultSampler
from retrograd_plugins.tokenizers.gpt2 import Gpt2Tokenizer

from .families import FAMILIES
from .stand_ins import SCENARIO, Echoes, Speaker, parts, stage_of
from .support import Agents, SumsConfig, SumsProvider, SumsWorld

CHOICE = ToolSpec(
    name="choose",
    description="Choose.",
    input_schema={
        "type": "object",
        "properties": {
            "which": {"enum": ["left", "right"]},
            "times": {"type": "integer", "minimum": 1, "maximum": 20},
        },
        "required": ["which", "times"],
    },
)
ON = {"constrain_tool_calls": "llguidance"}
EXACT = {"fast_sampling_context": False, "ctx": 1536}


class ChoiceWorld(SumsWorld):
    """One tool with two parameters."""

    async def tools(self) -> Sequence[ToolSpec]:
        return (CHOICE,)

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        return StepResult(observation="", reward=float(arguments["times"]), done=arguments["which"] == "left")


class ChoiceProvider(SumsProvider):
    """Makes them."""

    async def acquire(self, scenario: Any) -> ChoiceWorld:
        return ChoiceWorld(self._config)

    def catalogue(self) -> Mapping[str, Sequence[ToolSpec]]:
        return {"choice": (CHOICE,)}


class Eager(DefaultSampler):
    """Begins every turn with `<tool_call>`, then draws as the model wants but for white space, and stops
    where it may."""

    def __init__(self, tokenizer: Any) -> None:
        texts = [tokenizer.decode([token]) for token in range(tokenizer.vocabulary_size)]
        [self._opening] = tokenizer.encode("<tool_call>", special=True)
        self._wishes = np.array([-1000.0 * text.isspace() for text in texts])
        self._wishes[sorted(tokenizer.stop_ids)] = 1000.0

    def sample(self, logits: Any, params: Any, rng: np.random.Generator) -> tuple[int, float]:
        seed: Any = rng.bit_generator.seed_seq  # type: ignore[attr-defined]
        if seed.n_children_spawned == 0:
            seed.spawn(1)
            return self._opening, float(logits[self._opening])
        return super().sample(logits + self._wishes, params, rng)


@hookimpl
def retrograd_samplers() -> list[Component[Any, Any]]:
    return [
        Component(
            name="default",
            config=NoConfig,
            build=lambda config, context: Eager(context.service("tokenizer")),
            summary="Calls tools.",
            needs=("tokenizer",),
            fallback=True,
        )
    ]


@hookimpl
def retrograd_environments() -> list[Component[Any, Any]]:
    return [
        Component(
            name="choice",
            config=SumsConfig,
            build=lambda config, context: ChoiceProvider(config),
            summary="One tool.",
        )
    ]


def run_of(agents: Agents, training: Mapping[str, Any] = EXACT, **agent: Any) -> Any:
    """Path of a run with the eager sampler and the one tool."""
    (agents / "hooks.py").write_text(
        "from tests.agent.test_constrained import retrograd_environments, retrograd_samplers\n",
        encoding="utf-8",
    )
    keys: dict[str, Any] = {
        "environment": {"type": "choice"},
        "scenarios_per_update": 1,
        "group_size": 3,
        "max_turns": 1,
        "max_new_tokens_per_turn": 120,
        "max_dropped_fraction": 1.0,
        "skip_empty_updates": True,
        **agent,
    }
    return agents.agent(agent=keys, training=dict(training))


def services_of(path: Path) -> Any:
    """The parts of a run."""
    return assemble(open_document(path, model=None, device=None, overrides=())).services


def test_no_call_fails(agents: Agents) -> None:
    """Off, the same model makes no call that can be read."""
    services = services_of(run_of(agents))
    with closing(services.get("algorithm")) as algorithm:
        algorithm.prepare()
        metrics = algorithm.collect().metrics
        assert metrics["agent/failed_calls_fraction"] == 1.0
        assert "agent/constrained_tokens_fraction" not in metrics
    services = services_of(run_of(agents, **ON))
    with closing(services.get("algorithm")) as algorithm:
        findings = algorithm.prepare()
        assert "the grammar holds the calls of 1 tools" in [finding.message for finding in findings]
        metrics = algorithm.collect().metrics
        assert metrics["agent/failed_calls_fraction"] == metrics["agent/failed_fraction"] == 0.0
        assert metrics["agent/tool_calls_per_turn"] == 1.0
        assert 0.8 < metrics["agent/constrained_tokens_fraction"] < 1.0
        assert 0.5 < metrics["agent/masked_probability_mean"] < 1.0


def test_trajectories_do_not_depend_on_the_batch(agents: Agents) -> None:
    def play(at_once: int) -> list[Played]:
        services = services_of(run_of(agents, {**EXACT, "generation_concurrency": at_once}, **ON))
        with closing(services.get("algorithm")) as algorithm:
            algorithm.prepare()
            scenario = algorithm._scenarios[0]
            played, _ = algorithm._stage.play([Part(scenario=scenario, member=n, stream=n) for n in range(3)])
            arrays = [one.trajectory.arrays() for one in played]
            sequences = [TrainingSequence(tokens=tokens, trained=trained) for tokens, trained, _ in arrays]
            scored = services.get("engine").log_probabilities(sequences)
            # What training computes, as without a constraint: ratios are 1.
            for own, (_, trained, logp) in zip(scored, arrays, strict=True):
                assert np.array_equal(own, logp[trained])
            return list(played)

    together, alone = play(8), play(1)
    assert [one.failed_calls for one in together] == [0, 0, 0]
    assert len({tuple(one.trajectory.tokens) for one in together}) == 3
    for one, other in zip(together, alone, strict=True):
        assert one.trajectory.tokens == other.trajectory.tokens
        assert one.trajectory.masked == other.trajectory.masked


def tools_of(**properties: Any) -> tuple[Mapping[str, Any], ...]:
    """Two tools, the second with these parameters."""
    plain = {"type": "object", "properties": {}}
    parameters = {"type": "object", "properties": properties}
    return tuple(
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
        for name, schema in (("plain", plain), ("odd", parameters))
    )


@pytest.mark.parametrize(
    ("chat_format", "schema", "reason"),
    [
        (HermesFormat(), {"type": "array", "uniqueItems": True}, "uniqueItems"),
        (HermesFormat(), {"not": {"type": "string"}}, "not"),
        (Qwen3CoderFormat(), {"type": "string", "pattern": "^a"}, "the parameter 'a' .* 'pattern'"),
        (Qwen3CoderFormat(), {"$ref": "#/$defs/None"}, "'#/\\$defs/None'"),
    ],
)
def test_what_no_grammar_can_hold_is_refused(chat_format: Any, schema: Any, reason: str) -> None:
    engine = LlguidanceEngine(Gpt2Tokenizer(byte_level_vocabulary("qwen2")))
    constraints = CallConstraints(chat_format, engine)
    with pytest.raises(RolloutError, match=f"agent.constrain_tool_calls: .* schema of 'odd': .*{reason}"):
        constraints.of(tools_of(a=schema))
    assert constraints.of(tools_of(a={"type": "string"})) is not None
    assert constraints.of(()) is None


def test_a_format_without_a_grammar_is_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    agents = Agents(tmp_path, FAMILIES["lfm2"].model(tiny_model))
    with pytest.raises(ConfigError, match=r"'lfm2' .* no grammar.*have one: .*hermes.*qwen3_coder"):
        services_of(agents.agent(agent=ON)).get("algorithm")


def test_the_key_names_an_engine_that_is_installed(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"agent\.constrain_tool_calls: .*'llguidanse'.*llguidance"):
        services_of(agents.agent(agent={"constrain_tool_calls": "llguidanse"}))
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llguidance" else found(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"`pip install 'retrograd\[constrained\]'`"):
        services_of(agents.agent(agent=ON))
    services_of(agents.agent())


def test_a_thought_that_the_prompt_opened(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """What it says of calls is neither constrained nor read."""
    services = services_of(Agents(tmp_path, FAMILIES["deepseek"].model(tiny_model)).agent(agent=ON))
    tokenizer = services.get("tokenizer")
    with closing(services.get("algorithm")) as algorithm:
        player = algorithm._stage.player
        trajectory = player.begin(player.opening(SCENARIO))
        trajectory.tools = tools_of()
        trajectory.start()
        assert trajectory.thinking
        call = services.get("chat_format").format_calls([ToolCall(name="plain", arguments={})])
        text = f"hm, {call[:-40]}</think>{call}"
        ids = tokenizer.encode(text, special=True)
        constraint = player.constraints.of(trajectory.tools, thinking=True)
        for token in ids:
            mask = constraint.allowed()
            assert mask is None or mask[token]
            constraint.advance(token)
        tokens = np.array([*ids, min(tokenizer.stop_ids)], np.int32)
        parsed = trajectory.add_turn(
            Completion(tokens=tokens, logp=np.zeros(tokens.size), finish="stop", masked=(0.5,))
        )
        assert [one.name for one in parsed.tool_calls] == ["plain"]
        assert not parsed.error
        assert trajectory.messages[-1].content == text
        assert trajectory.masked == [0.5]


class GivesUp:
    """A constraint whose engine broke."""

    problem = "too complex"

    def allowed(self) -> None:
        return None

    def advance(self, token: int) -> None:
        pass


class Broken(CallConstraints):
    """Its constraints give up."""

    def __init__(self) -> None:
        pass

    def of(self, tools: Any, *, thinking: bool = False) -> Any:
        return GivesUp()


def test_a_constraint_that_gives_up_costs_its_trajectory() -> None:
    stage = stage_of(Speaker({-1: ["hm"]}), Echoes())
    stage.player = attrs.evolve(stage.player, constraints=Broken())
    with closing(stage):
        played, _ = stage.play(parts(1))
    assert played[0].failed == "constrained decoding failed: too complex"
    assert not played[0].setup_failed
