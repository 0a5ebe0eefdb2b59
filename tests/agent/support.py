"""Scripted trajectories and a small world: what the tests of agentic runs need.

Everything of a rollout is real (policy, engine, template, chat format, tools, environment) but the choice of
tokens: `ScriptedSampler` takes them from a file, by trajectory and turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np

from retrograd.agent.play import STREAMS_PER_TRAJECTORY
from retrograd.token_pieces import PieceEncoder
from retrograd_hookspecs import (
    AuditFinding,
    Component,
    Message,
    NoConfig,
    RolloutError,
    SamplingParams,
    Scenario,
    Score,
    StepResult,
    Tokenizer,
    ToolSpec,
    hookimpl,
    key,
)
from tests.e2e.support import Outcome, Workspace, _merged, retrograd, write_jsonl

Turn = str | Sequence[int]
"""What the model writes: a text, which a stop token follows; or the exact token ids."""
SMALL: dict[str, Any] = {
    "block_count": 1,
    "embedding_length": 32,
    "feed_forward_length": 32,
    "context_length": 2048,
}
"""A `TinyModel` that evaluates in a moment, with room for a catalogue of tools."""
EVERY = "*"
"""Script of the trajectories that have none of their own."""


class ScriptedSampler:
    """Draws the tokens of a script: `turns[str(trajectory)][turn]`.

    A sequence's stream is read from its generator's seed: trajectory = stream // 4096, turn = stream % 4096.
    How many tokens it has drawn is kept in the generator too, so that a repeated request begins anew.
    A turn without a script raises `RolloutError`, which fails all trajectories in flight: name every turn
    that is played. Behind the last id of a turn the stop token is repeated.
    """

    def __init__(self, turns: Mapping[str, Sequence[Turn]], tokenizer: Tokenizer, template: Any) -> None:
        pieces = PieceEncoder(tokenizer)
        stop = stop_token(tokenizer, template)
        before = tokenizer.encode("\n", special=True)[-1:]

        def ids(turn: Turn) -> list[int]:
            return [*pieces.turn(turn, before), stop] if isinstance(turn, str) else list(turn)

        self._turns = {name: [ids(turn) for turn in given] for name, given in turns.items()}
        self._stop = stop

    def sample(self, logits: Any, params: SamplingParams, rng: np.random.Generator) -> tuple[int, float]:
        """The next token of the script, and its log-probability under the model."""
        seed: Any = rng.bit_generator.seed_seq  # type: ignore[attr-defined]
        trajectory, turn = divmod(int(seed.entropy[1]), STREAMS_PER_TRAJECTORY)
        place: int = seed.n_children_spawned
        seed.spawn(1)
        script = self._turns.get(str(trajectory), self._turns.get(EVERY, ()))
        if turn >= len(script):
            raise RolloutError(f"trajectory {trajectory} has no script for turn {turn}")
        ids = script[turn]
        token = ids[place] if place < len(ids) else self._stop
        z = np.asarray(logits, np.float64)
        return token, float(z[token] - z.max() - np.log(np.exp(z - z.max()).sum()))


def stop_token(tokenizer: Tokenizer, template: Any) -> int:
    """The token that the template ends an assistant turn with."""
    messages = [Message(role="user", content="a"), Message(role="assistant", content="zqturn")]
    text = template.render(messages)
    found = PieceEncoder(tokenizer).find_stop(text[text.index("zqturn") :])
    assert found is not None, "the template writes no stop token"
    return found.token_id


def scripted_samplers(script: Path) -> Any:
    """The hook `retrograd_samplers` of a plugin whose sampler `default` draws from the file `script`."""

    def build(config: Any, context: Any) -> ScriptedSampler:
        turns = json.loads(script.read_text(encoding="utf-8"))
        return ScriptedSampler(turns, context.service("tokenizer"), context.service("template"))

    @hookimpl
    def retrograd_samplers() -> list[Component[Any, Any]]:
        return [
            Component(
                name="default",
                config=NoConfig,
                build=build,
                summary="Tokens of a script.",
                fallback=True,
                needs=("tokenizer", "template"),
            )
        ]

    return retrograd_samplers


def call(name: str, **arguments: Any) -> str:
    """A call as the tiny model's template and the fallback format write it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _schema(**properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }


TOOLS = (
    ToolSpec(name="add", description="Add.", input_schema=_schema(a="number", b="number")),
    ToolSpec(name="submit", description="Answer.", input_schema=_schema(answer="string")),
    ToolSpec(name="fail", description="Fails.", input_schema=_schema()),
    ToolSpec(name="wait", description="Waits.", input_schema=_schema(seconds="number")),
    ToolSpec(name="crash", description="Breaks.", input_schema=_schema()),
)


@attrs.frozen(kw_only=True)
class SumsConfig:
    """Keys of the environment `sums`."""

    bonus: float = key(1.0, doc="Reward of the right answer.")


class SumsWorld:
    """Sums: `submit` ends the episode, and the reward is `bonus` for `metadata.env.target`, else 0.

    Further keys of `metadata.env`: `grade` = "final" (default), "step" (the reward comes with the step),
    "none" (no reward) or "error"; `fail_setup`: why the world cannot start; `opening`: an observation before
    the first turn; `partial`: reward of any other answer.
    """

    def __init__(self, config: SumsConfig) -> None:
        self._config = config
        self._env: Mapping[str, Any] = {}
        self._answer: str | None = None
        self.closed = False

    async def reset(self, scenario: Scenario, seed: int) -> str | None:
        self._env = scenario.env
        if "fail_setup" in self._env:
            raise RolloutError(str(self._env["fail_setup"]))
        opening: str | None = self._env.get("opening")
        return opening

    async def tools(self) -> Sequence[ToolSpec]:
        return TOOLS

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        if name == "crash":
            raise RolloutError("the world broke")
        if name == "fail":
            return StepResult(observation="it failed", is_error=True)
        if name == "wait":
            await anyio.sleep(arguments["seconds"])
            return StepResult(observation="waited")
        if name == "add":
            return StepResult(observation=f"{arguments['a'] + arguments['b']:g}")
        self._answer = arguments["answer"]
        reward = self._reward() if self._env.get("grade") == "step" else None
        return StepResult(observation="thank you", reward=reward, done=True)

    async def grade(self) -> Score:
        grade = self._env.get("grade", "final")
        if grade == "error":
            return Score(kind="error", explanation="cannot be graded")
        if grade != "final":
            return Score(kind="missing")
        return Score(kind="value", value=self._reward())

    async def state(self) -> str | None:
        return None if self._answer is None else f"answer: {self._answer}"

    async def close(self) -> None:
        self.closed = True

    def _reward(self) -> float:
        right = self._answer == self._env.get("target")
        return self._config.bonus if right else float(self._env.get("partial", 0.0))


class SumsProvider:
    """Makes worlds of sums; `worlds` are all that were made."""

    def __init__(self, config: SumsConfig) -> None:
        self._config = config
        self.worlds: list[SumsWorld] = []
        self.closed = False

    async def prepare(self, scenarios: Sequence[Scenario]) -> Sequence[AuditFinding]:
        return []

    async def acquire(self, scenario: Scenario) -> SumsWorld:
        self.worlds.append(SumsWorld(self._config))
        return self.worlds[-1]

    def catalogue(self) -> Mapping[str, Sequence[ToolSpec]]:
        return {"sums": TOOLS}

    def signature(self) -> Mapping[str, Any]:
        return {"tools": [tool.name for tool in TOOLS]}

    async def warm_up(self, count: int) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        self.closed = True


@hookimpl
def retrograd_environments() -> list[Component[SumsConfig, Any]]:
    """`sums`."""
    return [
        Component(
            name="sums",
            config=SumsConfig,
            build=lambda config, context: SumsProvider(config),
            summary="Sums.",
        )
    ]


HOOKS = """\
from pathlib import Path

from tests.agent.support import retrograd_environments, scripted_samplers

script = Path(__file__).with_name("script.json")
if script.exists():
    retrograd_samplers = scripted_samplers(script)
"""


class Agents(Workspace):
    """`Workspace` with `scenarios.jsonl`, agentic run files, the environment `sums` and scripts."""

    def __init__(self, directory: Path, model: Path, device: str = "reference") -> None:
        super().__init__(directory, model, device)
        (self / "hooks.py").write_text(HOOKS, encoding="utf-8")
        self.scenarios([sum_scenario(number) for number in range(3)])

    def scenarios(self, records: Sequence[Mapping[str, Any]], name: str = "scenarios.jsonl") -> Path:
        """Write a scenario file."""
        return write_jsonl(self / name, records)

    def script(self, turns: Mapping[int | str, Sequence[Turn]]) -> None:
        """What the model writes, by trajectory (`EVERY` for those without a script of their own).

        The trajectory of a training run is draw * group_size + member, with draw = 0, 1, … over the whole
        run; the one of `collect` is scenario * k + attempt.
        """
        found = {str(name): list(map(_plain, given)) for name, given in turns.items()}
        (self / "script.json").write_text(json.dumps(found), encoding="utf-8")

    def agent(self, name: str = "agent.toml", **tables: Any) -> Path:
        """A small agentic run with the environment `sums` and `tables` laid over it."""
        base: dict[str, Any] = {
            "run": {"algorithm": "agent_grpo"},
            "sft": None,
            "plugins": {"load": ["hooks.py"]},
            "training": {"ctx": 1536, "micro_batch": 256, "lr": 1e-3},
            "agent": {
                "scenarios": "scenarios.jsonl",
                "scenarios_per_update": 2,
                "group_size": 4,
                "epochs_per_update": 1,
                "max_turns": 4,
                "max_new_tokens_per_turn": 160,
                "environment": {"type": "sums"},
            },
        }
        return self.toml(name, **_merged(base, tables))

    def train(self, path: Path, *arguments: object, code: int | None = 0) -> Outcome:
        """`retrograd train`."""
        return retrograd("train", path, *arguments, code=code)

    def updates(self, name: str = "out/adapter.metrics.jsonl") -> list[dict[str, Any]]:
        """Records of updates and their passes, without those of evaluations."""
        return [record for record in self.metrics(name) if "train/update" in record]


def _plain(turn: Turn) -> Any:
    return turn if isinstance(turn, str) else [int(token) for token in turn]


def sum_scenario(number: int, **env: Any) -> dict[str, Any]:
    """A scenario whose right answer is `number + 1`."""
    metadata = {"env": {"target": str(number + 1), **env}}
    return {"id": f"sum-{number}", "user": f"What is {number} + 1?", "metadata": metadata}


def right(number: int) -> list[str]:
    """Turns that solve `sum_scenario(number)` with two calls."""
    return [call("add", a=number, b=1), call("submit", answer=str(number + 1))]


def wrong(number: int) -> list[str]:
    """Turns that submit a wrong answer."""
    return [call("submit", answer=str(number + 7))]
