"""LFM 2: a list of Python calls between tokens.

<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._pythonic import read_calls, write_calls
from ._reading import Block, CallError, read_turn, skip_spaces

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_MARKER = re.compile(re.escape(_OPEN))


class Lfm2Format(FormatBase):
    """A bracketed list between the tokens. Some templates know no calls, so the vocabulary counts, too."""

    name = "lfm2"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return _OPEN in template or _OPEN in vocabulary

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        return f"{_OPEN}[{write_calls(calls, ', ')}]{_CLOSE}"


def _read(text: str, marker: re.Match[str]) -> Block:
    start = skip_spaces(text, marker.end())
    try:
        if not text.startswith("[", start):
            raise CallError(f"after {_OPEN} comes a list of calls in brackets")
        calls, end = read_calls(text, start + 1, "]")
        end = skip_spaces(text, end)
        if not text.startswith(_CLOSE, end):
            raise CallError(f"the list of calls has no {_CLOSE} where it should end")
        if not calls:
            raise CallError("the list of calls is empty")
        return Block(calls, end + len(_CLOSE))
    except CallError as error:
        closed = text.find(_CLOSE, start)
        return Block([], len(text) if closed < 0 else closed + len(_CLOSE), str(error))


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            Lfm2Format,
            "lfm2",
            "A list of Python calls between <|tool_call_start|> and <|tool_call_end|>: LFM 2",
            "LFM 2 chat template",
        )
    ]
