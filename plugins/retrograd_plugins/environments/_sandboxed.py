"""Tasks in sandboxes: what the environments `container` and `local` have in common.

A trajectory is graded by the exit code of its scenario's `verify` command, which runs out of the reach of
what the model left behind: see `_sandboxed_verify`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from retrograd.agent.arguments import validate_arguments
from retrograd.agent.tools import ToolCatalogue, command_text
from retrograd_hookspecs import (
    AuditFinding,
    Environment,
    ExecResult,
    RolloutError,
    Sandbox,
    SandboxProvider,
    Scenario,
    Score,
    StepResult,
    Tool,
    ToolSpec,
)

from ._sandboxed_tasks import Command, Task, task_of, tasks_of
from ._sandboxed_verify import Verifier

SHOWN_CHARACTERS = 2000
"""How much of the end of an output an error shows."""
_NEEDS: Mapping[str, tuple[Command, ...]] = {
    "bash": (("bash", "-c", "true"),),
    "grep": (("sh", "-c", "command -v grep && command -v sort && command -v xargs"),),
    "python": (("python3", "-c", ""),),
    "pytest": (("python3", "-c", "import pytest"),),
    "node": (("node", "-e", "0"),),
    "npm": (("npm", "--version"),),
}
"""What shows that built-in tools can work, by the id of the tool."""


@attrs.frozen(kw_only=True)
class Deadlines:
    """In seconds. `verify` None has none."""

    setup: float
    verify: float | None


class SandboxedProvider:
    """Environments with one sandbox each."""

    scenario_keys = """\
`files` (path to content, what the working directory holds at the start), `setup` (commands run before), \
`verify` ({"command": ["pytest", "-q"], "reward_on_success": 1.0}; exit code 0 means solved), `summary` (a \
command whose output is the final state) and `toolset`"""

    def __init__(
        self, sandboxes: SandboxProvider, catalogue: ToolCatalogue, deadlines: Deadlines, *, hint: str
    ) -> None:
        """`hint` says where a missing program comes from."""
        self._sandboxes = sandboxes
        self._catalogue = catalogue
        self._deadlines = deadlines
        self._hint = hint
        self._times = _Times()
        self.places: int | None = getattr(sandboxes, "places", None)
        """Sandboxes alive at once, where that is limited."""

    async def prepare(self, scenarios: Sequence[Scenario]) -> Sequence[AuditFinding]:
        """See `EnvironmentProvider.prepare`."""
        tasks = tasks_of(scenarios, self._catalogue.toolsets)
        findings = list(await self._sandboxes.prepare())
        await self._require_programs(tasks)
        findings += [
            AuditFinding(level="warning", check="tools", message=f"the toolset {name!r} has no tools")
            for name, specs in self._catalogue.specs().items()
            if not specs
        ]
        without = sum(task.verify is None for task in tasks)
        if without:
            text = f"{without} of {len(tasks)} scenarios have no verify command: only a judge can reward them"
            findings.append(AuditFinding(level="note", check="scenarios", message=text))
        return findings

    async def acquire(self, scenario: Scenario) -> Environment:
        """See `EnvironmentProvider.acquire`."""
        sandbox = await self._sandboxes.acquire()
        return SandboxedEnvironment(sandbox, self._catalogue, self._deadlines, self._times)

    def catalogue(self) -> Mapping[str, Sequence[ToolSpec]]:
        """See `EnvironmentProvider.catalogue`."""
        return self._catalogue.specs()

    def signature(self) -> Mapping[str, Any]:
        """See `EnvironmentProvider.signature`."""
        return {"tools": self._catalogue.signature(), "sandbox": dict(self._sandboxes.signature())}

    async def warm_up(self, count: int) -> None:
        """See `EnvironmentProvider.warm_up`."""
        await self._sandboxes.warm_up(count)

    def metrics(self) -> Mapping[str, float]:
        """Those of the sandboxes, with `setup_ms_mean` and `verify_ms_mean`."""
        return {**self._sandboxes.metrics(), **self._times.take()}

    async def close(self) -> None:
        """See `EnvironmentProvider.close`."""
        await self._sandboxes.close()

    async def _require_programs(self, tasks: Sequence[Task]) -> None:
        """Raises: `RolloutError` naming every tool that cannot work."""
        names = {task.toolset or self._catalogue.default for task in tasks} or {self._catalogue.default}
        labels = [entry.label.partition("@")[0] for name in names for entry in self._catalogue.entries(name)]
        needed = {id: _NEEDS[id] for id in sorted(set(labels)) if id in _NEEDS}
        if not needed:
            return
        missing: list[str] = []
        sandbox = await self._sandboxes.acquire()
        try:
            for id, commands in needed.items():
                for command in commands:
                    result = await sandbox.exec(command)
                    if result.exit_code:
                        missing.append(f"{id} (`{_text(command)}`: {_tail(result, 200)})")
        finally:
            await sandbox.close()
        if missing:
            raise RolloutError(f"tools cannot work: {'; '.join(missing)}; {self._hint}")


@attrs.define
class _Times:
    """How long setups and verifications take."""

    _setups: list[float] = attrs.field(factory=list, init=False)
    _verifications: list[float] = attrs.field(factory=list, init=False)

    def setup(self, seconds: float) -> None:
        self._setups.append(seconds)

    def verification(self, seconds: float) -> None:
        self._verifications.append(seconds)

    def take(self) -> dict[str, float]:
        """Means in milliseconds since the last call."""
        values = {"setup_ms_mean": self._setups, "verify_ms_mean": self._verifications}
        means = {name: 1000.0 * sum(times) / len(times) for name, times in values.items() if times}
        self._setups, self._verifications = [], []
        return means


class SandboxedEnvironment:
    """One trajectory in its sandbox."""

    def __init__(
        self, sandbox: Sandbox, catalogue: ToolCatalogue, deadlines: Deadlines, times: _Times
    ) -> None:
        self._sandbox = sandbox
        self._catalogue = catalogue
        self._deadlines = deadlines
        self._times = times
        self._task = Task()
        self._tools: dict[str, Tool] = {}
        self._verifier: Verifier | None = None
        self._summary: str | None = None
        self._summarized = False

    async def reset(self, scenario: Scenario, seed: int) -> str | None:
        """Write the scenario's files and run its setup. There is no opening observation, and no chance: the
        seed is not used."""
        started = time.monotonic()
        task = self._task = task_of(scenario, self._catalogue.toolsets)
        self._tools = {tool.spec.name: tool for tool in self._catalogue.tools_of(task.toolset)}
        where = scenario.origin or scenario.id
        try:
            await self._sandbox.write(task.files)
        except OSError as error:
            raise RolloutError(f"{where}: a file could not be written: {error}") from error
        for number, command in enumerate(task.setup):
            result = await self._sandbox.exec(command, timeout_secs=self._deadlines.setup)
            if result.timed_out or result.exit_code:
                how = (
                    f"took longer than setup_timeout_secs = {self._deadlines.setup:g} s"
                    if result.timed_out
                    else f"ended with exit code {result.exit_code}"
                )
                raise RolloutError(f"{where}: setup[{number}] `{_text(command)}` {how}: {_tail(result)}")
        if task.verify is not None:
            self._verifier = await Verifier.after_setup(self._sandbox, task, task.verify)
        self._times.setup(time.monotonic() - started)
        return None

    async def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`."""
        return [tool.spec for tool in self._tools.values()]

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """See `Environment.step`."""
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return StepResult(observation=f"there is no tool {name!r}; tools: {known}", is_error=True)
        problem = validate_arguments(tool.spec, arguments)
        if problem is not None:
            return StepResult(observation=problem, is_error=True)
        return await tool.call(self._sandbox, arguments)

    async def grade(self) -> Score:
        """The reward of `verify`: `reward_on_success` for exit code 0, and 0 for any other and for a command
        that does not end in time; an error where it cannot be run. The summary is taken before."""
        if self._verifier is None:
            return Score(kind="missing", explanation="the scenario has no verify command")
        started = time.monotonic()
        try:
            await self._summarize()
            score = await self._verifier.verify_in(self._sandbox, self._deadlines.verify)
        except RolloutError as error:
            return Score(kind="error", explanation=f"verify could not be run: {error}")
        self._times.verification(time.monotonic() - started)
        return score

    async def state(self) -> str | None:
        """What `summary` shows of the end of the trajectory; None for a scenario without."""
        await self._summarize()
        return self._summary

    async def close(self) -> None:
        """See `Environment.close`."""
        await self._sandbox.close()

    async def _summarize(self) -> None:
        """Once: verification changes files."""
        command = self._task.summary
        if command is None or self._summarized:
            return
        self._summarized = True
        result = await self._sandbox.exec(command)
        plain = result.exit_code == 0 and not result.truncated
        text = result.stdout.decode("utf-8", "replace") if plain else command_text(result)
        self._summary = text.rstrip("\n")


def _text(command: Command) -> str:
    import shlex

    return command[2] if command[:2] == ("sh", "-c") and len(command) == 3 else shlex.join(command)


def _tail(result: ExecResult, length: int = SHOWN_CHARACTERS) -> str:
    output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    return (f"…{output[-length:]}" if len(output) > length else output) or "no output"
