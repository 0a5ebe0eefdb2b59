"""A program that judges groups, over JSON lines on its standard input and output::

    [agent.judge]
    type = "command"
    command = ["python", "judge.py"]
    timeout_secs = 30

One line in a group::

    {"group": "…", "rubric": "…", "opening": [message, …],
     "members": [{"id": 0, "messages": [message, …], "final_state": null}, …]}

One line out, with a score from 0 to 1 for every member, in any order::

    {"group": "…", "scores": [{"id": 0, "score": 0.7, "explanation": "…"}, …]}

The program is run directly, without a shell, in the directory of the TOML, once for the run. A fault (a late,
missing or malformed line, an early end) fails the verdict on that group; the program with its process group
is killed and started anew for the next one. `docs/judges.md` has the protocol.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from retrograd_hookspecs import BuildContext, Component, ConfigError, Judge, Problem, hookimpl, key


@attrs.frozen(kw_only=True)
class CommandJudge:
    """Keys of a `judge` table with `type = "command"`; in Python, `judge=CommandJudge(command=(…,))`."""

    command: tuple[str, ...] = key(
        doc="Judge program, as an argument list; run directly, never through a shell."
    )
    timeout_secs: float = key(30.0, above=0.0, doc="Deadline of a verdict.", unit="seconds")

    @command.validator
    def _names_a_program(self, attribute: Any, value: tuple[str, ...]) -> None:
        if not value or not value[0]:
            raise ValueError('must name a program, as in ["python", "judge.py"]')
        if any("\0" in part for part in value):
            raise ValueError("holds a NUL character")


def find_program(name: str, directory: Path) -> str:
    """Path of a program: on PATH, or relative to `directory` if it has a slash.

    Raises: `ConfigError` if there is none that can be run.
    """
    import os
    import shutil

    if "/" not in name:
        found = shutil.which(name)
        message = f"there is no program {name!r} on PATH"
    else:
        path = directory / name
        found = str(path) if path.is_file() and os.access(path, os.X_OK) else None
        message = f"{path} is no program that can be run"
    if found is None:
        hint = 'a script that is no program itself is run by its interpreter: ["python", "judge.py"]'
        raise ConfigError([Problem(where="judge", key="command", message=message, hint=hint)])
    return found


def _build(config: CommandJudge, context: BuildContext) -> Judge:
    from ._command import JudgeProgram

    return JudgeProgram(config, find_program(config.command[0], context.base_dir), context.base_dir)


@hookimpl
def retrograd_judges() -> list[Component[CommandJudge, Judge]]:
    """`command`."""
    return [
        Component(
            name="command",
            config=CommandJudge,
            build=_build,
            summary="A program of yours judges groups, over JSON lines.",
            requires=("anyio",),
        )
    ]
