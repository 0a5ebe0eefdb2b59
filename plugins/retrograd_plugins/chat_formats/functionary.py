"""Functionary: a recipient before each part of the turn, or a function element.

    >>>all
    Let me look.
    >>>get_weather
    {"city": "Oslo"}
    <function=get_weather>{"city": "Oslo"}</function>

The first is version 3.2, whose prompt already ends in `>>>`; the second is 3.1, and what Llama 3.1 does when
its prompt asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._reading import Block, CallError, json_text, make_call, read_json, read_turn, skip_spaces

_CLOSE = "</function>"
_MARKER = re.compile(
    r"<function=(?P<element>[^<>\n]+)>|(?:\A|>>>)all\n|(?:\A|>>>)(?P<recipient>[^\s<>{}]+)\n(?=\s*\{)"
)


class FunctionaryFormat(FormatBase):
    """`>>>NAME` and JSON on the next line, or `<function=NAME>{…}</function>`."""

    name = "functionary"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return ">>>all" in template or ("<function=" in template and "<parameter=" not in template)

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        if "<function=" in self._template:
            return "".join(f"<function={call.name}>{json_text(call.arguments)}{_CLOSE}" for call in calls)
        return ">>>".join(f"{call.name}\n{json_text(call.arguments)}" for call in calls)


def _read(text: str, marker: re.Match[str]) -> Block:
    element, recipient = marker["element"], marker["recipient"]
    start = marker.end()
    if not element and not recipient:
        return Block([], start)
    try:
        arguments, end = read_json(text, start)
        if element:
            end = skip_spaces(text, end)
            if not text.startswith(_CLOSE, end):
                raise CallError(f"the call of {element!r} has no {_CLOSE} where it should end")
            end += len(_CLOSE)
        else:
            following = skip_spaces(text, end)
            if following < len(text) and not text.startswith(">>>", following):
                raise CallError(f"after the JSON of {recipient!r} comes >>> or the end of the turn")
        return Block([make_call(element or recipient, arguments)], end)
    except CallError as error:
        close = _CLOSE if element else ">>>"
        closed = text.find(close, start)
        end = len(text) if closed < 0 else closed + (len(close) if element else 0)
        return Block([], end, str(error))


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            FunctionaryFormat,
            "functionary",
            "A recipient before each part, or <function=…> elements: Functionary 3",
            "Functionary documentation, prompt templates v3.1 (Llama 3.1) and v3.2",
        )
    ]
