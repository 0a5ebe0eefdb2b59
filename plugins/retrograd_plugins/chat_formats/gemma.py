"""Gemma: Python in a `tool_code` block, or function-call tokens with their own notation of values.

    ```tool_code
    get_weather(city="Oslo")
    ```
    <start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>
    <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>

The first is Gemma 3's habit, the second FunctionGemma's, the third Gemma 4's. In the latter two, texts stand
between quoting tokens and keys are bare, so neither may contain what would end it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._pythonic import read_calls, write_calls
from ._reading import Block, CallError, json_text, make_call, plain, read_json, read_turn, skip_spaces

_FENCE = "```"
_HEAD = re.compile(r"\s*call:([^\s{}<>]+)\{")
_KEY = re.compile(r"\s*([^\s:{}\[\],<>]+)\s*:")
_SCALAR = re.compile(r"\s*([^\s{}\[\],<>]+)")
_DEEPEST = 100


@attrs.frozen
class _Notation:
    """The tokens of one generation."""

    opening: str
    closing: str
    quote: str


_TOKENS = (
    _Notation("<start_function_call>", "<end_function_call>", "<escape>"),
    _Notation("<|tool_call>", "<tool_call|>", '<|"|>'),
)
_MARKER = re.compile("|".join(re.escape(n.opening) for n in _TOKENS) + r"|```tool_code[ \t]*\n?")


class GemmaFormat(FormatBase):
    """Python calls in a fenced block, or `call:NAME{…}` between function-call tokens."""

    name = "gemma"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return "tool_code" in template or any(notation.opening in template for notation in _TOKENS)

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        for notation in _TOKENS:
            if notation.opening in self._template:
                return "".join(_written(call, notation) for call in calls)
        return f"{_FENCE}tool_code\n{write_calls(calls, chr(10))}\n{_FENCE}"


def _read(text: str, marker: re.Match[str]) -> Block:
    notation = next((n for n in _TOKENS if n.opening == marker.group()), None)
    start = marker.end()
    closing = notation.closing if notation else _FENCE
    try:
        if notation is None:
            calls, end = read_calls(text, start, _FENCE)
            if not calls:
                raise CallError("the tool_code block is empty")
            return Block(calls, end)
        head = _HEAD.match(text, start)
        if head is None:
            raise CallError(f"after {notation.opening} comes call:NAME{{key:value,…}}")
        arguments, end = _object(text, head.end(), notation, 0)
        end = skip_spaces(text, end)
        if not text.startswith(closing, end):
            raise CallError(f"the call of {head.group(1)!r} has no {closing} where it should end")
        return Block([make_call(head.group(1), arguments)], end + len(closing))
    except CallError as error:
        closed = text.find(closing, start)
        return Block([], len(text) if closed < 0 else closed + len(closing), str(error))


def _object(text: str, position: int, notation: _Notation, depth: int) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {}
    while True:
        position = skip_spaces(text, position)
        if text.startswith("}", position):
            return result, position + 1
        if text.startswith(notation.quote, position):
            key, position = _quoted(text, position, notation)
            position = skip_spaces(text, position)
            if not text.startswith(":", position):
                raise CallError(f"after the key {key!r} comes a colon")
            position += 1
        else:
            match = _KEY.match(text, position)
            if match is None:
                raise CallError("an object needs key:value")
            key, position = match.group(1), match.end()
        if key in result:
            raise CallError(f"the key {key!r} is given twice in one object")
        result[key], position = _value(text, position, notation, depth + 1)
        position = _separator(text, position, "}")


def _value(text: str, position: int, notation: _Notation, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise CallError(f"values are nested more than {_DEEPEST} deep")
    position = skip_spaces(text, position)
    if text.startswith(notation.quote, position):
        return _quoted(text, position, notation)
    if text.startswith("{", position):
        return _object(text, position + 1, notation, depth)
    if text.startswith("[", position):
        items: list[Any] = []
        position += 1
        while True:
            position = skip_spaces(text, position)
            if text.startswith("]", position):
                return items, position + 1
            value, position = _value(text, position, notation, depth + 1)
            items.append(value)
            position = _separator(text, position, "]")
    scalar = _SCALAR.match(text, position)
    if scalar is None:
        raise CallError("a value is missing")
    if scalar.group(1) in ("None", "none"):
        return None, scalar.end()
    value, end = read_json(scalar.group(1), 0)
    if end != len(scalar.group(1)) or isinstance(value, str):
        raise CallError(f"the value {scalar.group(1)!r} is neither quoted nor a number")
    return value, scalar.end()


def _separator(text: str, position: int, close: str) -> int:
    position = skip_spaces(text, position)
    if text.startswith(",", position):
        return position + 1
    if not text.startswith(close, position):
        raise CallError(f"a comma or {close} is missing")
    return position


def _quoted(text: str, position: int, notation: _Notation) -> tuple[str, int]:
    start = position + len(notation.quote)
    end = text.find(notation.quote, start)
    if end < 0:
        raise CallError(f"a text has no closing {notation.quote}")
    return text[start:end], end + len(notation.quote)


def _written(call: ToolCall, notation: _Notation) -> str:
    items = ",".join(f"{key}:{_shown(value, notation)}" for key, value in plain(call.arguments).items())
    return f"{notation.opening}call:{call.name}{{{items}}}{notation.closing}"


def _shown(value: Any, notation: _Notation) -> str:
    if isinstance(value, str):
        return f"{notation.quote}{value}{notation.quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shown(item, notation)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_shown(item, notation) for item in value) + "]"
    return json_text(value)


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            GemmaFormat,
            "gemma",
            "Python in tool_code blocks, or function-call tokens: Gemma 3, FunctionGemma, Gemma 4",
            "Gemma documentation, function calling; chat templates of FunctionGemma and Gemma 4",
        )
    ]
