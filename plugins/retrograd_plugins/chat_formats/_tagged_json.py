"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, which several families share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import ParsedTurn, ToolCall

from ._grammar import call_rules, quoted, turn_grammar
from ._reading import Block, CallError, call_of, json_text, read_json, read_turn, skip_spaces

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKER = re.compile(re.escape(OPEN))


def parse_tagged(text: str) -> ParsedTurn:
    """Content and calls of a turn."""
    return read_turn(text, _MARKER, read_tagged)


def read_tagged(text: str, marker: re.Match[str]) -> Block:
    """The call after an opening tag. Inside JSON texts a closing tag is text."""
    start = marker.end()
    try:
        value, end = read_json(text, start)
        end = skip_spaces(text, end)
        if not text.startswith(CLOSE, end):
            what = "something else follows" if end < len(text) else "the turn ends"
            raise CallError(f"after the call's JSON {what} where {CLOSE} belongs")
        return Block([call_of(value)], end + len(CLOSE))
    except CallError as error:
        closed = text.find(CLOSE, start)
        return Block([], len(text) if closed < 0 else closed + len(CLOSE), str(error))


def write_tagged(calls: Sequence[ToolCall], inner: str = "\n") -> str:
    """The calls one after another; `inner` stands between a tag and the JSON."""
    return "\n".join(f"{OPEN}{inner}{_object(call)}{inner}{CLOSE}" for call in calls)


def tagged_grammar(tools: Sequence[Mapping[str, Any]], thinking: bool, never: str = "") -> str:
    """Grammar of turns with such calls; text must not hold what `never` says."""
    rules = f"mark[lazy]: TEXT {quoted(OPEN)}\ncall: mark WS? object WS? {quoted(CLOSE)}\n{call_rules(tools)}"
    return turn_grammar(rules, thinking=thinking, marker=quoted(OPEN), never=never)


def _object(call: ToolCall) -> str:
    return f'{{"name": {json_text(call.name)}, "arguments": {json_text(call.arguments)}}}'
