"""Llama 3.1 to 3.3: the turn is a JSON object, or several with `; ` between them.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}

`<|python_tag|>` may stand before it, and before a built-in tool: `brave_search.call(query="…")`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._grammar import call_rules, turn_grammar
from ._pythonic import read_call
from ._reading import Block, CallError, call_of, json_text, nothing_follows, read_json, read_turn, skip_spaces

_TAG = "<|python_tag|>"
_MARKER = re.compile(r'<\|python_tag\|>|\{\s*"(?:name|type|parameters)"\s*:')
_BUILT_IN = re.compile(r"\s*(\w+)\.call\(")
_KEYS = ("parameters", "arguments")


class Llama3JsonFormat(FormatBase):
    """`{"name": …, "parameters": {…}}`."""

    name = "llama3_json"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return (
            "<|start_header_id|>" in template and '"parameters"' in template and "<function=" not in template
        )

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(
            f'{{"name": {json_text(call.name)}, "parameters": {json_text(call.arguments)}}}' for call in calls
        )

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> str:
        """Objects that begin with `name`, or `type` and `name`, up to the end of the turn. Text cannot hold
        an object that begins so and is no call."""
        rules = r"""
tagged[lazy]: TEXT "<|python_tag|>"
named[lazy]: TEXT NAME
typed[lazy]: TEXT TYPE
call: (tagged WS? one | named members | typed function members) (WS? ";" WS? one)* (WS? ";")? WS?
one: "{" WS? ("\"type\"" WS? ":" function | "\"name\"" WS? ":") members
function: WS? "\"function\"" WS? "," WS? "\"name\"" WS? ":"
NAME: /\{\s*"name"\s*:/
TYPE: /\{\s*"type"\s*:/
PARAMETERS: /\{\s*"parameters"\s*:/
"""
        rules += call_rules(tools, "parameters")
        return turn_grammar(
            rules,
            thinking=thinking,
            marker='NAME | TYPE | "<|python_tag|>"',
            ends=True,
            never="PARAMETERS",
        )


def _read(text: str, marker: re.Match[str]) -> Block | None:
    tagged = marker.group() == _TAG
    position = marker.end() if tagged else marker.start()
    if tagged and (built_in := _BUILT_IN.match(text, position)):
        try:
            call, end = read_call(text, built_in.start(1), name=built_in.group(1), opening=built_in.end())
            return Block([call], end)
        except CallError as error:
            return Block([], len(text), str(error))
    calls: list[ToolCall] = []
    while True:
        try:
            value, position = read_json(text, position)
            if not tagged and not calls and not (isinstance(value, dict) and {*_KEYS} & {*value}):
                # An answer that happens to be JSON.
                return None
            calls.append(call_of(value, _KEYS))
        except CallError as error:
            if not tagged and not calls and not any(f'"{key}"' in text for key in _KEYS):
                return None
            return Block(calls, len(text), str(error))
        following = skip_spaces(text, position)
        if not text.startswith(";", following):
            try:
                nothing_follows(text, position)
            except CallError as error:
                return Block(calls[:-1], len(text), str(error))
            return Block(calls, position)
        position = following + 1
        if skip_spaces(text, position) == len(text):
            return Block(calls, len(text))


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            Llama3JsonFormat,
            "llama3_json",
            "JSON with name and parameters: Llama 3.1, 3.2, 3.3",
            "Llama 3.1 model card, section on tool calling; its chat template",
        )
    ]
