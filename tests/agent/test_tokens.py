"""What is trained is what was sampled: token ids and log-probabilities of whole rollouts, bit for bit.

Nothing here decodes: trajectories are compared with what the script said, with the engine, with each other
and with the samples of supervised fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from retrograd.agent.play import Played
from retrograd.agent.stage import Part
from retrograd.assembly import assemble
from retrograd.cli.document import open_document
from retrograd.conversation import Conversation
from retrograd.engine import TrainingSequence
from retrograd.engine.generation import Completion, GenerationRequest
from retrograd_hookspecs import ToolCall
from retrograd_plugins.algorithms.agent_grpo import AgenticGrpo

from .families import FAMILIES, names
from .support import SMALL, Agents, Turn, stop_token

EXACT = {"fast_sampling_context": False, "ctx": 3072}
TRAJECTORIES = 3
REWRITES = {"qwen3", "deepseek", "mistral", "gemma", "tools as text"}
"""Families whose templates change turns of the trajectories below."""


@attrs.frozen
class Rehearsal:
    """A run that is ready to play, and what its trajectories write."""

    algorithm: AgenticGrpo
    services: Any
    turns: list[list[Turn]]

    def play(self, **player: Any) -> list[Played]:
        """Play the first trajectories."""
        stage = self.algorithm._stage
        stage.player = attrs.evolve(stage.player, **player)
        scenario = self.algorithm._scenarios[0]
        parts = [Part(scenario=scenario, member=n, stream=n) for n in range(TRAJECTORIES)]
        self.services.get("policy").weights_changed()
        played, _ = stage.play(parts)
        return played


def services_of(path: Path) -> Any:
    """The parts of a run."""
    return assemble(open_document(path, model=None, device=None, overrides=())).services


def prepared(agents: Agents, turns: Callable[[Any], list[list[Turn]]], **tables: Any) -> Rehearsal:
    """Assemble a run; `turns(services)` is what each trajectory writes."""
    path = agents.agent(**tables)
    written = turns(services_of(path))
    agents.script(dict(enumerate(written)))
    services = services_of(path)
    algorithm = services.get("algorithm")
    algorithm.prepare()
    return Rehearsal(algorithm, services, written)


def conversation(services: Any) -> list[list[Turn]]:
    """Trajectories with tool turns: text and calls, two calls, errors, calls that cannot be read, and a turn
    in a token for each character, as no tokenizer would cut it."""
    chat_format, tokenizer = services.get("chat_format"), services.get("tokenizer")
    stop = stop_token(tokenizer, services.get("template"))

    def calls(*given: tuple[str, dict[str, Any]]) -> str:
        return str(chat_format.format_calls([ToolCall(name=name, arguments=a) for name, a in given]))

    add = calls(("add", {"a": 1, "b": 2}))
    both = calls(("add", {"a": 3, "b": 4}), ("fail", {}))
    wrong = calls(("divide", {"a": 1}), ("add", {"a": "x"}))
    submit = calls(("submit", {"answer": "three"}))
    letters = [token for letter in submit for token in tokenizer.encode(letter)]
    return [
        [f"<think>\nhm, it is\n\n3?\n</think>\n\n{add}", both, wrong, submit],
        [f"<think>\nso\n</think>\n\n{both}", broken(chat_format, add), add, submit],
        [add, "I do not know. \n\n", wrong, [*letters, stop]],
    ]


def broken(chat_format: Any, text: str) -> str:
    """A call that the format refuses."""
    for end in range(len(text) - 1, 0, -1):
        if chat_format.parse(text[:end]).error:
            return text[:end]
    raise AssertionError(f"the format {chat_format.name} reads every beginning of {text!r}")


def check(played: Sequence[Played], rehearsal: Rehearsal) -> None:
    """The trajectories against the engine and against supervised fine-tuning."""
    engine = rehearsal.services.get("engine")
    arrays = [one.trajectory.arrays() for one in played]
    sequences = [TrainingSequence(tokens=tokens, trained=trained) for tokens, trained, _ in arrays]
    scored = engine.log_probabilities(sequences, [list(range(len(sequences)))])
    for one, (tokens, trained, logp), own in zip(played, arrays, scored, strict=True):
        assert not one.failed, one.failed
        assert not one.truncated, one.truncated
        assert np.array_equal(own, logp[trained])
        assert not logp[~trained].any()
        trajectory = one.trajectory
        given = Conversation(messages=(*trajectory.opening, *trajectory.messages), tools=trajectory.tools)
        [sample] = trajectory.encoder.encode(given).samples
        assert list(sample.tokens) == tokens.tolist()
        assert list(sample.trained) == trained.tolist()


def same(first: Sequence[Played], second: Sequence[Played]) -> None:
    """Two ways to play gave the same trajectories."""
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.trajectory.arrays(), other.trajectory.arrays(), strict=True):
            assert np.array_equal(a, b)
        assert one.trajectory.messages == other.trajectory.messages


class Sessionless:
    """The policy without the caches of sessions."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    async def generate(self, request: GenerationRequest, session: object = None) -> Completion:
        completion: Completion = await self._policy.generate(request, None)
        return completion

    def end_session(self, session: object) -> None:
        """There is none."""


@pytest.mark.parametrize("family", names())
def test_every_chat_format(family: str, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    agents = Agents(tmp_path, FAMILIES[family].model(tiny_model))
    limits = {"end_on_no_tool_call": False, "max_turns": 6, "group_size": TRAJECTORIES}

    rehearsal = prepared(agents, conversation, agent=limits, training=EXACT)
    assert rehearsal.services.get("chat_format").name == FAMILIES[family].format
    with closing(rehearsal.algorithm):
        played = rehearsal.play()
        check(played, rehearsal)
        for one, written in zip(played, rehearsal.turns, strict=True):
            assert one.turns == len(written) == 4
            assert one.reward.value == 0.0
            assert one.final_state == "answer: three"
            said = [m for m in one.trajectory.messages if m.role == "assistant"]
            for message, text in zip(said, written, strict=True):
                if isinstance(text, str):
                    assert message.content == text
                else:
                    assert message.token_ids == tuple(text)
        assert [one.failed_calls for one in played] == [2, 1, 2]
        assert [one.unread_calls for one in played] == [0, 1, 0]
        assert [one.tool_errors for one in played] == [1, 1, 0]
        assert any(one.trajectory.rewritten for one in played) == (family in REWRITES)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_sessions_and_concurrency_change_nothing(
    family: str, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """With a rounded sampler too, whose cache of a session is not that of a prompt."""
    agents = Agents(tmp_path, FAMILIES[family].model(tiny_model))
    agent = {"end_on_no_tool_call": False, "max_turns": 6}

    def play(*, exact: bool, at_once: int, sessions: bool = True) -> list[Played]:
        training = {**EXACT, "fast_sampling_context": not exact, "generation_concurrency": at_once}
        rehearsal = prepared(agents, conversation, agent=agent, training=training)
        with closing(rehearsal.algorithm):
            policy = rehearsal.services.get("policy")
            played = rehearsal.play(speaker=policy if sessions else Sessionless(policy))
            return played

    exact = play(exact=True, at_once=8)
    same(exact, play(exact=True, at_once=1))
    same(exact, play(exact=True, at_once=2, sessions=False))
    if family == "qwen3":
        same(play(exact=False, at_once=8), play(exact=False, at_once=2))


def test_sliding_windows_and_sentence_pieces(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(
        architecture="gemma3", context_length=4096, block_count=6, embedding_length=32, feed_forward_length=32
    )
    rehearsal = prepared(
        Agents(tmp_path, model),
        conversation,
        agent={"end_on_no_tool_call": False, "max_turns": 6},
        training=EXACT,
    )
    assert rehearsal.services.get("chat_format").name == "prompt"
    with closing(rehearsal.algorithm):
        check(rehearsal.play(), rehearsal)


def test_the_seed_decides_every_draw(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """Without a script; how many are in play, and in which update, decides nothing."""
    agents = Agents(tmp_path, tiny_model(**SMALL))
    limits = {"max_new_tokens_per_turn": 12, "max_turns": 2}

    def once(at_once: int = 8, **agent: Any) -> list[list[int]]:
        training = {"generation_concurrency": at_once}
        path = agents.agent(agent=limits | agent, training=training)
        services = services_of(path)
        with closing(services.get("algorithm")) as algorithm:
            algorithm.prepare()
            played = Rehearsal(algorithm, services, []).play()
            return [one.trajectory.tokens for one in played]

    first = once()
    assert len({tuple(tokens) for tokens in first}) == TRAJECTORIES
    assert once() == once(at_once=1) == first
    assert once(seed=43) != first
