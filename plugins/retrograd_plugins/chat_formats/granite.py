"""Granite 3: a JSON array after `<|tool_call|>`. (Granite 4 writes as Hermes.)

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]

Phi 4 mini writes the same with `<|/tool_call|>` at the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._grammar import call_rules, quoted, turn_grammar
from ._reading import Block, CallError, call_of, json_text, nothing_follows, read_json, read_turn, skip_spaces

_OPEN, _CLOSE = "<|tool_call|>", "<|/tool_call|>"
_MARKER = re.compile(re.escape(_OPEN))


class GraniteFormat(FormatBase):
    """`<|tool_call|>` and an array of objects with name and arguments."""

    name = "granite"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return _OPEN in template

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        objects = ", ".join(
            f'{{"name": {json_text(call.name)}, "arguments": {json_text(call.arguments)}}}' for call in calls
        )
        return f"{_OPEN}[{objects}]{_CLOSE if _CLOSE in self._template else ''}"

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> str:
        """The array, which ends the turn unless the template closes it."""
        closed = _CLOSE in self._template
        end = f"WS? {quoted(_CLOSE)}" if closed else f"(WS? {quoted(_OPEN)} list)* WS?"
        rules = (
            f"mark[lazy]: TEXT {quoted(_OPEN)}\n"
            f"call: mark list {end}\n"
            'list: WS? "[" WS? object (WS? "," WS? object)* WS? "]"\n'
        )
        return turn_grammar(
            rules + call_rules(tools), thinking=thinking, marker=quoted(_OPEN), ends=not closed
        )


def _read(text: str, marker: re.Match[str]) -> Block:
    start = marker.end()
    try:
        value, end = read_json(text, start)
        calls = [call_of(item) for item in value] if isinstance(value, list) else [call_of(value)]
        if not calls:
            raise CallError("the list of calls is empty")
        closing = skip_spaces(text, end)
        if text.startswith(_CLOSE, closing):
            return Block(calls, closing + len(_CLOSE))
        nothing_follows(text, end, _OPEN)
        return Block(calls, end)
    except CallError as error:
        following = text.find(_OPEN, start)
        return Block([], len(text) if following < 0 else following, str(error))


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            GraniteFormat,
            "granite",
            "A JSON array after <|tool_call|>: Granite 3, Phi 4 mini",
            "Granite 3 documentation, function calling; chat templates of Granite 3 and Phi 4 mini",
        )
    ]
