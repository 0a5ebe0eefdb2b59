"""What a scenario's `metadata.env` says for a sandbox::

    {"files": {"src/parser.py": "…", "tests/test_parser.py": "…"},
     "setup": ["pip install -e ."],
     "verify": {"command": ["pytest", "-q"], "reward_on_success": 1.0},
     "summary": ["git", "diff"],
     "toolset": "python"}

A command is a list, run as it is, or a string, run by the shell. `setup` is a list of commands. `verify` may
also have `files`, which are written just before its command runs and are not seen before, and `protect`,
patterns of files that are brought back to what they were at the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from retrograd.config.messages import did_you_mean, listing
from retrograd.records import kind_of
from retrograd_hookspecs import DataError, Problem, Scenario

Command = tuple[str, ...]

PROTECTED = (
    "tests/**",
    "test/**",
    "__tests__/**",
    "**/test_*.py",
    "**/*_test.py",
    "**/conftest.py",
    "**/*.test.*",
    "**/*.spec.*",
    "**/pytest.ini",
    "**/.pytest.ini",
    "**/tox.ini",
    "**/setup.cfg",
    "**/pyproject.toml",
    "**/sitecustomize.py",
    "**/usercustomize.py",
    "**/package.json",
    "**/jest.config.*",
    "**/vitest.config.*",
    "**/.mocharc*",
)
"""Tests, and what decides how they are run, where a scenario does not say what to protect."""


@attrs.frozen(kw_only=True)
class Verify:
    """How the result of a trajectory is checked."""

    command: Command
    reward_on_success: float = 1.0
    files: Mapping[str, bytes] = attrs.field(factory=dict)
    protect: tuple[str, ...] = PROTECTED


@attrs.frozen(kw_only=True)
class Task:
    """A scenario's task. Paths are relative to the working directory."""

    files: Mapping[str, bytes] = attrs.field(factory=dict)
    setup: tuple[Command, ...] = ()
    verify: Verify | None = None
    summary: Command | None = None
    toolset: str = ""


def task_of(scenario: Scenario, toolsets: Collection[str]) -> Task:
    """The task of a scenario. Raises: `DataError` with everything that is wrong with it."""
    reader = _Reader(scenario)
    env = scenario.env
    reader.require_known(env, [field.name for field in attrs.fields(Task)], "metadata.env")
    task = Task(
        files=reader.files(env, "metadata.env.files"),
        setup=reader.commands(env),
        verify=reader.verify(env),
        summary=reader.command(env, "summary", "metadata.env.summary") if "summary" in env else None,
        toolset=reader.toolset(env, toolsets),
    )
    if reader.problems:
        raise DataError(reader.problems)
    return task


def tasks_of(scenarios: Sequence[Scenario], toolsets: Collection[str]) -> list[Task]:
    """The tasks of all scenarios. Raises: `DataError` with the problems of all."""
    problems: list[Problem] = []
    tasks: list[Task] = []
    for scenario in scenarios:
        try:
            tasks.append(task_of(scenario, toolsets))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return tasks


class _Reader:
    """Reads parts of `metadata.env`, and collects what is wrong."""

    def __init__(self, scenario: Scenario) -> None:
        self._where = scenario.origin or f"scenario {scenario.id!r}"
        self.problems: list[Problem] = []

    def add(self, key: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(where=self._where, key=key, message=message, hint=hint))

    def require_known(self, table: Mapping[str, Any], known: Collection[str], key: str) -> None:
        for name in table:
            if name not in known:
                hint = did_you_mean(name, known) or listing(known, what="known keys")
                self.add(f"{key}.{name}", "unknown key", hint)

    def files(self, table: Mapping[str, Any], key: str) -> dict[str, bytes]:
        given = table.get("files", {})
        if not isinstance(given, Mapping):
            self.add(key, f"must be an object of paths and texts, is {kind_of(given)}")
            return {}
        files: dict[str, bytes] = {}
        for path, text in given.items():
            place = f"{key}[{path!r}]"
            problem = _path_problem(path)
            if problem:
                self.add(place, problem, "paths are relative to /work, such as src/main.py")
            elif not isinstance(text, str):
                self.add(place, f"must be a string, is {kind_of(text)}")
            else:
                files[path] = text.encode("utf-8", "replace")
        for path in files:
            for above in _above(path):
                if above in files:
                    self.add(f"{key}[{above!r}]", f"is a file, and the directory of {path!r}")
        return files

    def command(self, table: Mapping[str, Any], name: str, key: str) -> Command:
        return self._command(table.get(name), key) or ()

    def commands(self, env: Mapping[str, Any]) -> tuple[Command, ...]:
        key = "metadata.env.setup"
        given = env.get("setup", [])
        if not isinstance(given, list):
            self.add(key, f"must be a list of commands, is {kind_of(given)}", "put it in [ ]")
            return ()
        found = [self._command(command, f"{key}[{index}]") for index, command in enumerate(given)]
        return tuple(command for command in found if command)

    def verify(self, env: Mapping[str, Any]) -> Verify | None:
        key = "metadata.env.verify"
        if "verify" not in env:
            return None
        table = env["verify"]
        if not isinstance(table, Mapping):
            self.add(key, f"must be an object with a command, is {kind_of(table)}")
            return None
        self.require_known(table, [field.name for field in attrs.fields(Verify)], key)
        if "command" not in table:
            self.add(f"{key}.command", "required key is missing", "the command that checks the result")
            return None
        reward = table.get("reward_on_success", 1.0)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            self.add(f"{key}.reward_on_success", f"must be a finite number, is {kind_of(reward)}")
        elif reward == 0:
            self.add(f"{key}.reward_on_success", "must not be 0: success would be worth as much as failure")
        return Verify(
            command=self.command(table, "command", f"{key}.command"),
            reward_on_success=float(reward) if isinstance(reward, int | float) else 1.0,
            files=self.files(table, f"{key}.files"),
            protect=self._patterns(table, f"{key}.protect"),
        )

    def toolset(self, env: Mapping[str, Any], toolsets: Collection[str]) -> str:
        key = "metadata.env.toolset"
        name = env.get("toolset", "")
        if not isinstance(name, str):
            self.add(key, f"must be a string, is {kind_of(name)}")
            return ""
        if name and name not in toolsets:
            hint = did_you_mean(name, toolsets) or listing(toolsets, what="toolsets of scenarios")
            add = f"{hint}; others are added to [agent.environment.tools] scenario_toolsets"
            self.add(key, f"no scenario can have the toolset {name!r}", add)
        return name

    def _patterns(self, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
        given = table.get("protect", list(PROTECTED))
        if not isinstance(given, list) or not all(isinstance(pattern, str) for pattern in given):
            self.add(key, f"must be a list of patterns, is {kind_of(given)}", 'such as ["tests/**"]')
            return ()
        return tuple(given)

    def _command(self, given: Any, key: str) -> Command | None:
        """A command as a list; a string is a line of the shell."""
        if isinstance(given, str) and given.strip() and "\0" not in given:
            return ("sh", "-c", given)
        is_list = isinstance(given, list) and given and all(isinstance(part, str) for part in given)
        if is_list and given[0] and not any("\0" in part for part in given):
            return tuple(given)
        is_empty = given in ("", [], None) or (isinstance(given, str) and not given.strip())
        what = "is empty" if is_empty else f"must be a string or a list of strings, is {kind_of(given)}"
        self.add(key, what, 'such as ["pytest", "-q"]')
        return None


def _path_problem(path: str) -> str:
    parts = path.split("/")
    if path.startswith("/"):
        return "must be a relative path"
    if ".." in parts:
        return "leads out of the working directory"
    if not path or "." in parts or "" in parts:
        return "is not the plain path of a file"
    if "\n" in path or "\0" in path:
        return "holds a line break or a null character"
    return ""


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def protects(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a path matches any of the patterns: `*` stays in a directory, `**` does not, and `**/` may be
    nothing."""
    import re

    def expression(pattern: str) -> str:
        text = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*")
        return text.replace(r"\*", "[^/]*").replace(r"\?", "[^/]")

    if not patterns:
        return lambda path: False
    whole = re.compile("|".join(expression(pattern) for pattern in patterns), re.DOTALL)
    return lambda path: whole.fullmatch(path) is not None
