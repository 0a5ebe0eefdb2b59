"""Problems in the order in which a reader meets them, each once."""

from __future__ import annotations

import re
from collections.abc import Iterable

from retrograd_hookspecs import ConfigError, Problem

_FILE_LINE = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?::\d+)?$")


def ordered(problems: Iterable[Problem]) -> list[Problem]:
    """Without duplicates; what concerns a whole file first, then by line, then flags."""
    unique = list(dict.fromkeys(problems))
    return sorted(unique, key=_place)


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise `ConfigError` with all of them, if there are any."""
    found = ordered(problems)
    if found:
        raise ConfigError(found)


def _place(problem: Problem) -> tuple[int, str, int]:
    if problem.where.startswith("--"):
        return (1, problem.where, 0)
    match = _FILE_LINE.match(problem.where)
    if match is None:
        return (0, problem.where, 0)
    return (0, match["file"], int(match["line"]))
