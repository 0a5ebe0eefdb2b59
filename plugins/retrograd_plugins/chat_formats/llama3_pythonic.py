"""Llama 3.2 and 4 where the prompt asks for Python: the turn is a list of calls.

    [get_weather(city="Oslo"), add(a=1, b=2)]

Llama 4 may put it between `<|python_start|>` and `<|python_end|>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._pythonic import read_calls, write_calls
from ._reading import Block, CallError, nothing_follows, read_turn, skip_spaces

_END = "<|python_end|>"
# A list that begins like one of calls; "[1]" in an answer is no call.
_MARKER = re.compile(r"(?:<\|python_start\|>\s*|<\|python_tag\|>\s*)?\[\s*(?=[^\W\d][\w.\-/]*\()")


class Llama3PythonicFormat(FormatBase):
    """A bracketed list of Python calls with keyword arguments."""

    name = "llama3_pythonic"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return "func_name1(" in template

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        return f"[{write_calls(calls, ', ')}]"


def _read(text: str, marker: re.Match[str]) -> Block:
    try:
        calls, end = read_calls(text, marker.end(), "]")
        following = skip_spaces(text, end)
        if text.startswith(_END, following):
            return Block(calls, following + len(_END))
        nothing_follows(text, end)
        return Block(calls, end)
    except CallError as error:
        return Block([], len(text), str(error))


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            Llama3PythonicFormat,
            "llama3_pythonic",
            "A list of Python calls: Llama 3.2 and 4 where the template asks for it",
            "Llama 3.2 model card, section on zero-shot function calling",
        )
    ]
