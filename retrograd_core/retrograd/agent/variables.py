"""Environment variables in texts of a configuration: `${VAR}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def expand(text: str, environ: Mapping[str, str], folder: Path) -> str:
    """A text with its variables replaced, once.

    They are `${VAR}`, `${env:VAR}`, `${VAR:-default}`, `${workspaceFolder}` and `${userHome}`.

    Args:
        folder: what `${workspaceFolder}` stands for.

    Raises:
        ValueError: a variable is not set, or not known.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == "workspaceFolder":
            return str(folder)
        if name == "userHome":
            return str(Path.home())
        if name.startswith("input:"):
            raise ValueError(
                f"${{{name}}} asks a person, whom a run has not: write ${{env:VARIABLE}} and set the variable"
            )
        name = name.removeprefix("env:")
        name, given, default = name.partition(":-")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"${{{match[1]}}} is not known; known are ${{VAR}}, ${{env:VAR}}, ${{workspaceFolder}} and"
                " ${userHome}"
            )
        if name in environ:
            return environ[name]
        if given:
            return default
        raise ValueError(f"the environment variable {name} is not set")

    return _VARIABLE.sub(value, text)
