"""Contracts of learning from rewards: rewards, judges, environments, tools, sandboxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import attrs


@attrs.frozen(kw_only=True)
class Score:
    """A reward is a value, missing, or an error; never a made-up number."""

    kind: Literal["value", "missing", "error"]
    value: float = 0.0
    explanation: str = ""


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


class Reward(Protocol):
    """Scores a batch of answers."""

    def score(self, prompts: Sequence[str], completions: Sequence[str]) -> Sequence[Score]:
        """One score per answer, in order."""


class Judge(Protocol):
    """Compares the members of a group."""

    async def score(self, group: Sequence[Mapping[str, Any]]) -> Sequence[Score]:
        """One score per member, in order."""


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
