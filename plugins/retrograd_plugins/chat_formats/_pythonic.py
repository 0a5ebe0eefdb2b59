"""Calls written as Python: `name(key="value", n=1)`, with JSON's spelling of constants accepted, too.

Own reader instead of `ast`: tools have names and parameters that are no Python identifiers (`read-file`,
`from`), and nothing but literals may come out.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import ToolCall

from ._reading import CallError, make_call, plain, skip_spaces

_NAME = re.compile(r"[^\W\d][\w.\-/]*")
_KEY = re.compile(r"([^\W\d][\w\-]*)\s*=(?!=)")
_STRING = re.compile(
    r"\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'", re.DOTALL
)
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_CONSTANT = re.compile(r"(?:True|False|None|true|false|null)\b")
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_DEEPEST = 100


def read_calls(text: str, position: int, close: str) -> tuple[list[ToolCall], int]:
    """Calls with commas or white space between them up to `close`, and the index after it.

    Raises `CallError`.
    """
    calls: list[ToolCall] = []
    while True:
        position = skip_spaces(text, position)
        if text.startswith(close, position):
            return calls, position + len(close)
        call, position = read_call(text, position)
        calls.append(call)
        position = skip_spaces(text, position)
        if text.startswith((",", ";"), position):
            position += 1


def read_call(text: str, position: int, *, name: str = "", opening: int = 0) -> tuple[ToolCall, int]:
    """The call at a place; with `name`, whose arguments begin at `opening`. Raises `CallError`."""
    if not name:
        match = _NAME.match(text, position)
        if match is None or not text.startswith("(", match.end()):
            raise CallError(f"a call NAME(key=value, …) is expected at {_around(text, position)}")
        name, opening = match.group(), match.end() + 1
    if name == "print" and _is_call(text, opening):
        call, position = read_call(text, skip_spaces(text, opening))
        position = skip_spaces(text, position)
        if not text.startswith(")", position):
            raise CallError("print(…) holds more than one call")
        return call, position + 1
    arguments, position = _keywords(text, opening, name)
    return make_call(name, arguments), position


def _is_call(text: str, position: int) -> bool:
    match = _NAME.match(text, skip_spaces(text, position))
    return match is not None and text.startswith("(", match.end())


def _keywords(text: str, position: int, name: str) -> tuple[dict[str, Any], int]:
    arguments: dict[str, Any] = {}
    while True:
        position = skip_spaces(text, position)
        if text.startswith(")", position):
            return arguments, position + 1
        if text.startswith("**", position):
            more, position = _value(text, position + 2, 0)
            if not isinstance(more, dict):
                raise CallError(f"** in the call of {name!r} needs a dictionary")
            items = more.items()
        else:
            key = _KEY.match(text, position)
            if key is None:
                raise CallError(f"the call of {name!r} needs key=value at {_around(text, position)}")
            value, position = _value(text, key.end(), 0)
            items = {key.group(1): value}.items()
        for argument, value in items:
            if argument in arguments:
                raise CallError(f"the argument {argument!r} of {name!r} is given twice")
            arguments[argument] = value
        position = _separator(text, position, ")")


def _separator(text: str, position: int, close: str) -> int:
    position = skip_spaces(text, position)
    if text.startswith(",", position):
        return position + 1
    if not text.startswith(close, position):
        raise CallError(f"a comma or {close} is expected at {_around(text, position)}")
    return position


def _value(text: str, position: int, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise CallError(f"values are nested more than {_DEEPEST} deep")
    position = skip_spaces(text, position)
    if match := _STRING.match(text, position):
        try:
            return ast.literal_eval(match.group()), match.end()
        except (ValueError, SyntaxError):
            raise CallError(f"the text at {_around(text, position)} has an invalid escape") from None
    if match := _NUMBER.match(text, position):
        return _number(match.group()), match.end()
    if match := _CONSTANT.match(text, position):
        return _CONSTANTS[match.group()], match.end()
    for opening, close in (("[", "]"), ("(", ")")):
        if text.startswith(opening, position):
            return _items(text, position + 1, close, depth)
    if text.startswith("{", position):
        return _dictionary(text, position + 1, depth)
    raise CallError(f"a literal value is expected at {_around(text, position)}")


def _number(text: str) -> int | float:
    if re.fullmatch(r"[-+]?\d+", text):
        try:
            return int(text)
        except ValueError:
            raise CallError("a number has too many digits") from None
    number = float(text)
    if not math.isfinite(number):
        raise CallError(f"the number {text} is out of range")
    return number


def _items(text: str, position: int, close: str, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while True:
        position = skip_spaces(text, position)
        if text.startswith(close, position):
            return items, position + 1
        value, position = _value(text, position, depth + 1)
        items.append(value)
        position = _separator(text, position, close)


def _dictionary(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {}
    while True:
        position = skip_spaces(text, position)
        if text.startswith("}", position):
            return result, position + 1
        key, position = _value(text, position, depth + 1)
        position = skip_spaces(text, position)
        if not isinstance(key, str) or not text.startswith(":", position):
            raise CallError(f'a dictionary needs "key": value at {_around(text, position)}')
        if key in result:
            raise CallError(f"the key {key!r} is given twice in one dictionary")
        result[key], position = _value(text, position + 1, depth + 1)
        position = _separator(text, position, "}")


def _around(text: str, position: int) -> str:
    return repr(text[position : position + 20]) if position < len(text) else "the end of the turn"


def write_call(call: ToolCall) -> str:
    """The call as Python; arguments whose names are no keywords go into `**{…}`."""
    keywords: list[str] = []
    rest: dict[str, Any] = {}
    for key, value in call.arguments.items():
        if re.fullmatch(r"[^\W\d][\w\-]*", key) and not rest:
            keywords.append(f"{key}={plain(value)!r}")
        else:
            rest[key] = plain(value)
    if rest:
        keywords.append(f"**{rest!r}")
    return f"{call.name}({', '.join(keywords)})"


def write_calls(calls: Sequence[ToolCall], separator: str) -> str:
    """Several calls."""
    return separator.join(write_call(call) for call in calls)
