"""SmolLM 3: JSON between `<tool_call>` tags, or Python between `<code>` tags.

    <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>
    <code>
    get_weather(city="Oslo")
    </code>

Its template offers both (`xml_tools`, `python_tools`). Code that is more than calls with literal arguments is
an error: there is no interpreter behind this format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._grammar import quoted
from ._pythonic import read_calls
from ._reading import Block, CallError, read_turn
from ._tagged_json import OPEN, read_tagged, tagged_grammar, write_tagged

_CODE, _CODE_END = "<code>", "</code>"
_MARKER = re.compile(f"{re.escape(OPEN)}|{_CODE}")


class SmolLM3Format(FormatBase):
    """JSON between tags on one line; Python calls between `<code>` tags are read, too."""

    name = "smollm3"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return "xml_tools" in template and "python_tools" in template

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        return write_tagged(calls, inner="")

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> str:
        """Tagged JSON; text without `<code>`, which would begin calls in Python."""
        return tagged_grammar(tools, thinking, never=quoted(_CODE))


def _read(text: str, marker: re.Match[str]) -> Block:
    if marker.group() == OPEN:
        return read_tagged(text, marker)
    start = marker.end()
    try:
        calls, end = read_calls(text, start, _CODE_END)
        if not calls:
            raise CallError("the code block is empty")
        return Block(calls, end)
    except CallError as error:
        closed = text.find(_CODE_END, start)
        return Block([], len(text) if closed < 0 else closed + len(_CODE_END), str(error))


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            SmolLM3Format,
            "smollm3",
            "JSON between <tool_call> tags or Python between <code> tags: SmolLM 3",
            "SmolLM 3 chat template",
        )
    ]
