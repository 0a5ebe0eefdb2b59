"""Words for values and mistakes: what was seen, what was expected, what was probably meant."""

from __future__ import annotations

import datetime
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

_SHOWN_CHARACTERS = 60
_SHOWN_NAMES = 12


def show(value: object) -> str:
    """A TOML value as a message names it: `"text"`, `7.9`, `true`, `an array of 3`, `a table`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | PurePath):
        text = str(value)
        if len(text) <= _SHOWN_CHARACTERS:
            return quote(text)
        return f"{quote(text[:_SHOWN_CHARACTERS])}… ({len(text)} characters)"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.date | datetime.time):
        return f"the date or time {value.isoformat()}"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, Sequence):
        return f"an array of {len(value)}" if value else "an empty array"
    return f"{value!r} ({type(value).__name__})"


def show_typed(value: object) -> str:
    """Like `show`, with the word "string" where the quotes alone are easily overlooked."""
    return f"the string {show(value)}" if isinstance(value, str) else show(value)


def quote(text: str) -> str:
    """A TOML basic string."""
    return json.dumps(text, ensure_ascii=False)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None."""
    names = list(known)
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in names}
    exact = folded.get(name.lower().replace("-", "_"))
    if exact is not None:
        return exact
    matches = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.7)
    return folded[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, quoted: bool = False) -> str:
    """`did you mean X?`, or "" without a near name."""
    match = nearest(name, known)
    if match is None:
        return ""
    return f"did you mean {quote(match) if quoted else match}?"


def one_of(values: Sequence[object]) -> str:
    """`"a"`, `"a" or "b"`, `one of "a", "b", "c"`."""
    shown = [show(value) for value in values]
    if len(shown) <= 2:
        return " or ".join(shown)
    return "one of " + ", ".join(shown)


def listing(names: Iterable[str], *, what: str) -> str:
    """`WHAT: a, b, c` for a short list, else a count and where the list is."""
    sorted_names = sorted(names)
    if not sorted_names:
        return ""
    if len(sorted_names) > _SHOWN_NAMES:
        return f"there are {len(sorted_names)} {what}; `retrograd config-schema` lists them"
    return f"{what}: {', '.join(sorted_names)}"


def number(value: float) -> str:
    """A bound as people write it: 1 rather than 1.0."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def bounds_text(
    *, minimum: float | None, maximum: float | None, above: float | None, below: float | None
) -> str:
    """`at least 0 and below 1`, or "" without bounds."""
    words = [
        f"{word} {number(bound)}"
        for word, bound in (
            ("at least", minimum),
            ("above", above),
            ("at most", maximum),
            ("below", below),
        )
        if bound is not None
    ]
    return " and ".join(words)


def suggestion(value: Any, expected: type) -> str:
    """How to write a scalar of the wrong type, where the right one is evident: `write 512`."""
    if isinstance(value, str):
        return _unquoted(value.strip(), expected)
    if expected is str and isinstance(value, bool | int | float):
        return f"write {quote(show(value))}"
    if expected is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if expected is bool and not isinstance(value, bool) and value in (0, 1):
        return f"write {'true' if value else 'false'}"
    return ""


def _unquoted(text: str, expected: type) -> str:
    if expected is bool and text.lower() in ("true", "false", "yes", "no", "on", "off"):
        return f"write {'true' if text.lower() in ('true', 'yes', 'on') else 'false'} without quotes"
    if expected in (int, float):
        try:
            value = float(text.replace("_", ""))
        except ValueError:
            return ""
        if expected is float or value.is_integer():
            return f"write {text} without quotes"
    return ""
