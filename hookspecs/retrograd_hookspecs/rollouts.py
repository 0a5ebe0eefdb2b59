"""Contracts of learning from rewards: rollouts, rewards, judges, environments, tools, sandboxes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from .text import Message

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .training import AuditFinding

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
    wrote the token; `logp` float64 (n,) is the log-probability it was drawn with (a constraint's mask left
    out), 0 elsewhere. `messages` is what followed the prompt. `total` is the reward that advantages are taken
    of, None until it is known or if there is none; `advantage` (n,) is 0 where nothing is trained. `excluded`
    says why the rollout is not trained; "" if it is. `step_rewards` are pairs of the index of the first token
    after a step's call and the step's reward; `final_state` is what the environment ended in, for the judge.
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
    final_state: str | None = None
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


@attrs.frozen
class Scenario:
    """A task of a scenario file. `origin` is `file:line`; `metadata` may hold `rubric` and `env`."""

    id: str
    user: str
    system: str = ""
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    origin: str = ""

    @property
    def rubric(self) -> str:
        """Grading criteria of its own for the judge; "" for the judge's."""
        return str(self.metadata.get("rubric", ""))

    @property
    def env(self) -> Mapping[str, Any]:
        """What the environment reads."""
        env: Mapping[str, Any] = self.metadata.get("env") or {}
        return env


@attrs.frozen(kw_only=True)
class ToolSpec:
    """A tool as the model sees it. `input_schema` is a JSON Schema object."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    version: str = ""


@attrs.frozen(kw_only=True)
class StepResult:
    """What an action gave. `is_error` is an observation to the model, not an exception.

    `reward` is that of the step, None for none; `done` ends the episode.
    """

    observation: str
    is_error: bool = False
    reward: float | None = None
    done: bool = False


class Environment(Protocol):
    """One isolated world; one instance a trajectory, closed on every path, cancellation included.

    An action that fails is a `StepResult` with `is_error`. A world that is broken (lost session, dead
    container) raises `RolloutError`: that costs this trajectory alone. What the model sees is a
    deterministic function of the scenario, the seed and the actions: no host name, path of the host, id,
    duration or time.
    """

    async def reset(self, scenario: Scenario, seed: int) -> str | None:
        """Start the scenario; an opening observation, which follows the user's message, or None."""

    async def tools(self) -> Sequence[ToolSpec]:
        """The tools of this world, in a fixed order; asked for once, after `reset`."""

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Act. `name` is one of `tools()`, `arguments` fit its schema."""

    async def grade(self) -> Score:
        """The final reward once the episode has ended; of kind "missing" if the scenario has none, or its
        rewards came with the steps."""

    async def state(self) -> str | None:
        """Final state for the judge, asked for once after `grade`; None if there is none to show."""

    async def close(self) -> None:
        """Release everything; may be called more than once."""


class EnvironmentProvider(Protocol):
    """Makes the worlds of a run's trajectories, and owns what they share (a pool, connections).

    A provider that can have only so many worlds at once says so in an attribute `places`, an int: further
    trajectories then begin when others have ended, and do not spend their time waiting in `acquire`. One that
    says in an attribute `scenario_keys` what `env` of a scenario may hold has a model write it
    (`retrograd scenarios generate`): the names of the keys, each with what it means.
    """

    async def prepare(self, scenarios: Sequence[Scenario]) -> Sequence[AuditFinding]:
        """Validate everything before the first rollout: scenarios, images, tools, reachability. Raises
        `DataError` with every bad scenario, `ConfigError` or `RolloutError` where the service is not
        there."""

    async def acquire(self, scenario: Scenario) -> Environment:
        """A world that is not started yet; may wait for a place. Raises `RolloutError` if there is none."""

    def catalogue(self) -> Mapping[str, Sequence[ToolSpec]]:
        """Tools by toolset name, as far as known without a world; for `tools list` and the run's
        signature."""

    def signature(self) -> Mapping[str, Any]:
        """What must be equal for a checkpoint to be resumed, JSON-compatible: tools, scripts, images."""

    async def warm_up(self, count: int) -> None:
        """Make up to `count` worlds ready while the model trains; may do nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Figures since the last call, without the prefix `env/`: `acquire_ms_mean`, …"""

    async def close(self) -> None:
        """Release everything; may be called more than once. Leaves nothing behind."""


@attrs.frozen(kw_only=True)
class ExecResult:
    """What a command in a sandbox gave. `truncated` counts the bytes of output that were cut off."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: int = 0


class Sandbox(Protocol):
    """Somewhere to run commands and keep files. Paths are absolute, or relative to the working directory.

    A command that fails, or is killed at its deadline with all it started, is an `ExecResult`; a sandbox
    that is broken raises `RolloutError`.
    """

    @property
    def scratch(self) -> str:
        """Absolute path of a directory outside the working directory for files that are no part of the task,
        such as scripts of tools; `write` makes it. Removed with the sandbox, and emptied before it is used
        again. The same text for all sandboxes of a run where the model can see it."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_secs: float | None = None,
        max_output_bytes: int | None = None,
    ) -> ExecResult:
        """Run a command without a shell.

        None takes the sandbox's own deadline, and its own limit on what is kept: the first bytes of stdout
        and of stderr, each up to the limit; all of it is read. A command that is not there ends with 127. At
        the deadline everything that runs in the sandbox is killed, also what earlier commands left running.
        """

    async def read(self, path: str, *, limit: int) -> bytes:
        """At most `limit` bytes of a file. Raises `FileNotFoundError`, `IsADirectoryError`,
        `PermissionError`."""

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Create files or replace what is in them, and create the directories they are in. Raises `OSError`,
        `ENOSPC` included."""

    async def clear(self, keep: Collection[str] = ()) -> None:
        """Kill all processes and delete all files, those below the directories `keep` apart. Raises
        `RolloutError` if anything is left."""

    async def close(self) -> None:
        """Release everything; may be called more than once."""


class SandboxProvider(Protocol):
    """Makes sandboxes: what the environments `container` and `local` differ in."""

    async def prepare(self) -> Sequence[AuditFinding]:
        """Check engine and image, remove what killed runs left. Raises `RolloutError`."""

    async def acquire(self) -> Sandbox:
        """A clean sandbox; waits for a place."""

    def signature(self) -> Mapping[str, Any]:
        """As `EnvironmentProvider.signature`."""

    async def warm_up(self, count: int) -> None:
        """As `EnvironmentProvider.warm_up`."""

    def metrics(self) -> Mapping[str, float]:
        """As `EnvironmentProvider.metrics`."""

    async def close(self) -> None:
        """Release everything; may be called more than once."""


class Tool(Protocol):
    """A tool that acts in a sandbox. Stateless: one instance serves all trajectories."""

    @property
    def spec(self) -> ToolSpec:
        """What the model sees."""

    async def call(self, sandbox: Sandbox, arguments: Mapping[str, Any]) -> StepResult:
        """Act; `arguments` fit the schema. What goes wrong for the model is a result with `is_error`; a tool
        that is itself broken raises `RolloutError`."""


@attrs.frozen(kw_only=True)
class ToolDefinition:
    """A tool by `id@version`. It is made by `builtin` = {factory, params}, or runs `exec` = {argv, script,
    protocol, timeout_secs} inside the sandbox."""

    id: str
    version: str
    name: str = ""
    """As the model calls it; the id if it is empty."""
    description: str = ""
    input_schema: Mapping[str, Any] = attrs.field(factory=dict)
    builtin: Mapping[str, Any] | None = None
    exec: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True)
class ToolsetDefinition:
    """A toolset: included ones first, then its tools (one with the same id or name replaces), then `deny`.

    What a component of the kind `toolsets` gives. `definitions` are tools that it brings along.
    """

    name: str
    include: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    """`id` (the newest version) or `id@version`."""
    deny: tuple[str, ...] = ()
    """Exposed names; `*` is a wildcard."""
    definitions: tuple[ToolDefinition, ...] = ()


class ToolFactory(Protocol):
    """Makes a built-in tool from a definition: what a component of the kind `tool_factories` gives."""

    def make(self, definition: ToolDefinition) -> Tool:
        """The tool. Raises `ConfigError` for unknown parameters, each with its name as `key`."""
