"""Messages for text that is not TOML: where, why, and what was probably meant."""

from __future__ import annotations

import re

from retrograd_hookspecs import Problem

from .scanner import Duplicate, scan

_AT = re.compile(
    r"^(?P<message>.*) \((?:at line (?P<line>\d+), column (?P<column>\d+)|at end of document)\)$",
    re.DOTALL,
)
_TOKEN = re.compile(r"[^\s,\]}#]+")
_SMART_QUOTES = "“”„‘’"


def syntax_problem(text: str, name: str, message: str) -> Problem:
    """The problem for a message of `tomllib`, at `file:line:column`.

    A key or table that is written twice is reported by name, with both lines, because `tomllib` only
    knows where it noticed.
    """
    duplicates = scan(text).duplicates
    if duplicates and message.startswith("Cannot "):
        return _duplicate(duplicates[0], name)
    match = _AT.match(message)
    lines = text.split("\n")
    if match is None:
        return Problem(where=name, message=f"not valid TOML: {message}")
    if match["line"] is None:
        line, column = _last_position(lines)
    else:
        line, column = int(match["line"]), int(match["column"])
    source = lines[line - 1] if line <= len(lines) else ""
    reason = match["message"]
    return Problem(
        where=f"{name}:{line}:{column}",
        message=f"not valid TOML: {reason[:1].lower()}{reason[1:]}: {source.strip()}",
        hint=_hint(reason, source, column),
    )


def _duplicate(duplicate: Duplicate, name: str) -> Problem:
    dotted = ".".join(str(part) for part in duplicate.path)
    return Problem(
        where=f"{name}:{duplicate.second}",
        key=dotted,
        message=f"given twice, first at line {duplicate.first}",
        hint="keep one of them",
    )


def _last_position(lines: list[str]) -> tuple[int, int]:
    """Line and column after the last character that is not blank."""
    for line in range(len(lines), 0, -1):
        if lines[line - 1].strip():
            return line, len(lines[line - 1].rstrip()) + 1
    return 1, 1


def _hint(reason: str, source: str, column: int) -> str:
    if any(character in source for character in _SMART_QUOTES):
        return 'use straight quotes: "'
    if "\\" in source and ("escape" in reason.lower() or "hex" in reason.lower()):
        return "in a path write / or put the text in single quotes"
    if reason == r"Illegal character '\n'":
        return "the closing quote is missing"
    if reason.startswith("Invalid value"):
        token = _TOKEN.match(source, column - 1)
        return _value_hint(token.group()) if token else "a value is missing after ="
    if reason.startswith("Expected newline") and source[column - 1 :].lstrip().startswith("="):
        return ""
    if reason.startswith("Expected '='") or reason.startswith("Expected newline"):
        return "one key = value a line; strings need quotes"
    return ""


def _value_hint(token: str) -> str:
    if token.lower() in ("true", "false"):
        return f"write {token.lower()}"
    if token.lower() in ("none", "null", "nil"):
        return "TOML has no null: leave the key out"
    if token.startswith("."):
        return f"write 0{token}"
    return f"strings need quotes: '{token}'" if "\\" in token else f'strings need quotes: "{token}"'
