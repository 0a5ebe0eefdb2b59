"""DeepSeek V3, R1 and V3.1: calls between tokens of their own.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>   (on one line)

Before V3.1 the word `function` stands where the name is, and the name and a fenced JSON block follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._grammar import alternatives, arguments_json, function_of, quoted, turn_grammar
from ._reading import Block, CallError, json_text, make_call, read_json, read_turn, skip_spaces

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MARKER = re.compile(f"{_BEGIN}|{_CALL}")
_FENCED = re.compile(r"([^\s`]+)[ \t]*\n```json[ \t]*\n")


class DeepSeekFormat(FormatBase):
    """Names and JSON arguments between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`."""

    name = "deepseek"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return _CALL in template

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        if "```json" in self._template:
            written = "\n".join(
                f"{_CALL}function{_SEPARATOR}{call.name}\n```json\n{json_text(call.arguments)}\n```{_CALL_END}"
                for call in calls
            )
        else:
            written = "".join(
                f"{_CALL}{call.name}{_SEPARATOR}{json_text(call.arguments)}{_CALL_END}" for call in calls
            )
        return f"{_BEGIN}{written}{_END}"

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> str:
        """Calls between the outer tokens, or one alone."""
        lines = [
            f"begin[lazy]: TEXT {quoted(_BEGIN)}",
            f"bare[lazy]: TEXT {quoted(_CALL)}",
            f"call: begin (WS? {quoted(_CALL)} one)+ WS? {quoted(_END)} | bare one",
            f"one: ({alternatives('tool', len(tools))}) WS? {quoted(_CALL_END)}",
        ]
        for number, (name, schema) in enumerate(map(function_of, tools)):
            arguments = arguments_json(schema)
            if "```json" in self._template:
                head = quoted(f"function{_SEPARATOR}{name}\n```json\n")
                lines.append(f'tool_{number}: {head} WS? {arguments} WS? "```"')
            else:
                lines.append(f"tool_{number}: {quoted(name + _SEPARATOR)} WS? {arguments}")
        marker = f"{quoted(_BEGIN)} | {quoted(_CALL)}"
        return turn_grammar("\n".join(lines), thinking=thinking, marker=marker)


def _read(text: str, marker: re.Match[str]) -> Block:
    """All calls of a turn, with or without the outer tokens."""
    outer = marker.group() == _BEGIN
    position = skip_spaces(text, marker.end()) if outer else marker.start()
    calls: list[ToolCall] = []
    try:
        while text.startswith(_CALL, position):
            call, position = _read_call(text, position + len(_CALL))
            calls.append(call)
            position = skip_spaces(text, position)
        if not calls:
            raise CallError(f"after {_BEGIN} comes {_CALL}")
        if text.startswith(_END, position):
            position += len(_END)
        elif outer and position < len(text):
            raise CallError(f"after the calls something else follows where {_END} belongs")
        return Block(calls, position)
    except CallError as error:
        closed = text.find(_END, position)
        return Block(calls, len(text) if closed < 0 else closed + len(_END), str(error))


def _read_call(text: str, position: int) -> tuple[ToolCall, int]:
    separator = text.find(_SEPARATOR, position)
    if separator < 0:
        raise CallError(f"the call has no {_SEPARATOR}")
    name = text[position:separator].strip()
    position = separator + len(_SEPARATOR)
    fenced = _FENCED.match(text, position) if name == "function" else None
    if fenced:
        name, position = fenced.group(1), fenced.end()
    arguments, position = read_json(text, position)
    position = skip_spaces(text, position)
    if fenced:
        if not text.startswith("```", position):
            raise CallError("the call's JSON block is not closed by ```")
        position = skip_spaces(text, position + 3)
    if not text.startswith(_CALL_END, position):
        raise CallError(f"the call of {name!r} has no {_CALL_END} where it should end")
    return make_call(name, arguments), position + len(_CALL_END)


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            DeepSeekFormat,
            "deepseek",
            "Calls between DeepSeek's own tokens: V3, R1, V3.1",
            "Chat templates of DeepSeek V3, R1 and V3.1",
        )
    ]
