"""Contracts of learning from rewards: rollouts, rewards, judges, environments, tools, sandboxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from .text import Message

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Finish = Literal["stop", "length"]
"""How a turn ended: with a stop token, or cut at its budget."""


@attrs.frozen(kw_only=True)
class Score:
    """A reward is a value, missing, or an error; never a made-up number.

    `value` is finite and only read where `kind` is "value"; `explanation` says why there is none, or what
    a judge found. `judge_weight` (at least 0) replaces the run's weight of the judge's verdict for this
    answer.
    """

    kind: Literal["value", "missing", "error"]
    value: float = 0.0
    explanation: str = ""
    judge_weight: float | None = None


@attrs.frozen(kw_only=True)
class Answer:
    """What a reward sees of one answer.

    `prompt` is the text of the last user message, `messages` the whole prompt; `completion` the text that
    the model wrote, without the stop token. `metadata` holds the further fields of the prompt's record.
    """

    prompt: str
    completion: str
    messages: tuple[Message, ...] = ()
    finish: Finish = "stop"
    metadata: Mapping[str, Any] = attrs.field(factory=dict)


class Reward(Protocol):
    """Scores answers. Called in one thread; open until `close`."""

    def score(self, answers: Sequence[Answer]) -> Sequence[Score]:
        """One score per answer, in order. Raises `RolloutError` where the reward itself is broken, which
        ends the run; an answer that cannot be scored is a `Score` of kind "missing" or "error"."""

    def close(self) -> None:
        """Release everything; may be called more than once."""


@attrs.frozen(kw_only=True)
class JudgeMember:
    """One member of a group: the messages after the shared opening, and what its environment ended in."""

    messages: tuple[Message, ...]
    final_state: str | None = None


@attrs.frozen(kw_only=True)
class JudgeGroup:
    """Answers or trajectories of one task, to be compared with each other.

    `opening` is what all members share. `rubric` is the task's own; "" for the judge's.
    """

    id: str
    opening: tuple[Message, ...]
    members: tuple[JudgeMember, ...]
    rubric: str = ""


class Judge(Protocol):
    """Compares the members of a group."""

    async def score(self, group: JudgeGroup) -> Sequence[Score]:
        """One score per member, in order, values in [0, 1]. A group is judged whole or not at all: if any
        verdict fails, every score is of kind "error". Does not raise for a failed verdict."""

    async def close(self) -> None:
        """Release everything; may be called more than once."""


@attrs.define(eq=False, kw_only=True)
class Rollout:
    """One answer or trajectory: its tokens, its text, and what it earned.

    `tokens` int32 (n,) from the first token of the prompt on; `trained` bool (n,) is True where the policy
    wrote the token; `logp` float64 (n,) is the log-probability it was drawn with, 0 elsewhere. `messages`
    is what followed the prompt. `total` is the reward that advantages are taken of, None until it is known or
    if there is none; `advantage` (n,) is 0 where nothing is trained. `excluded` says why the rollout is not
    trained; "" if it is. `step_rewards` are pairs of the index of a step's first token and its reward.
    """

    id: str
    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    logp: npt.NDArray[np.float64]
    completion: str
    messages: tuple[Message, ...]
    finish: Finish
    reward: Score
    judgement: Score | None = None
    total: float | None = None
    advantage: npt.NDArray[np.float64] | None = None
    excluded: str = ""
    step_rewards: tuple[tuple[int, float], ...] = ()
    metrics: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def trained_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return int(self.trained.sum())


@attrs.define(eq=False, kw_only=True)
class RolloutGroup:
    """The rollouts of one prompt or scenario, compared with each other.

    `source` is `file:line` of the record, `messages` the prompt, `prompt_tokens` its length in tokens.
    `dropped` says why the whole group is not trained; "" if it is.
    """

    id: str
    source: str
    messages: tuple[Message, ...]
    prompt_tokens: int
    members: list[Rollout]
    rubric: str = ""
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    dropped: str = ""


@attrs.frozen(kw_only=True)
class ToolSpec:
    """A tool as the model sees it. `input_schema` is a JSON Schema object."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    version: str = ""


@attrs.frozen(kw_only=True)
class StepResult:
    """What an action gave. `is_error` is an observation to the model, not an exception."""

    observation: str
    is_error: bool = False
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """One isolated world; one instance a trajectory, closed on every path."""

    async def reset(self, scenario: Mapping[str, Any], seed: int) -> str | None:
        """Start the scenario; an opening observation or None."""

    async def tools(self) -> Sequence[ToolSpec]:
        """The tools of this world."""

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Act."""

    async def state(self) -> str | None:
        """Final state for the judge."""

    async def close(self) -> None:
        """Release everything; may be called more than once."""


class Sandbox(Protocol):
    """Somewhere to run commands and keep files."""

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_secs: float
    ) -> tuple[int, bytes, bytes]:
        """Exit code, stdout, stderr."""

    async def read(self, path: str) -> bytes:
        """Contents of a file."""

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file."""

    async def close(self) -> None:
        """Release everything; may be called more than once."""


class Toolset(Protocol):
    """Tools that run inside a sandbox."""

    def specs(self) -> Sequence[ToolSpec]:
        """What the model sees, in a fixed order."""

    async def call(self, sandbox: Sandbox, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Run one call."""
