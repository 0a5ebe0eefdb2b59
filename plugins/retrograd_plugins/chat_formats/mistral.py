"""Mistral: `[TOOL_CALLS]`, in two generations.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "call00000"}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}

The second (from tokenizer version 11 on) repeats for each call, perhaps with `[CALL_ID]` before `[ARGS]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._grammar import alternatives, arguments_json, call_rules, function_of, quoted, turn_grammar
from ._reading import Block, CallError, call_of, json_text, make_call, nothing_follows, read_json, read_turn

_MARK, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MARKER = re.compile(re.escape(_MARK))
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([^\[\]]*))?\[ARGS\]")


class MistralFormat(FormatBase):
    """A JSON array after `[TOOL_CALLS]`, or a name and `[ARGS]` with the JSON arguments."""

    name = "mistral"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return _MARK in template

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        if _ARGS in self._template:
            return "".join(map(self._with_args, calls))
        space = " " if "[TOOL_CALLS] [" in self._template else ""
        return f"{_MARK}{space}[{', '.join(map(_as_object, calls))}]"

    def _with_args(self, call: ToolCall) -> str:
        call_id = f"{_ID}{call.id}" if call.id and _ID in self._template else ""
        return f"{_MARK}{call.name}{call_id}{_ARGS}{json_text(call.arguments)}"

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> str:
        """One array, or calls one after another, up to the end of the turn."""
        mark = quoted(_MARK)
        if _ARGS in self._template:
            middle = f"({quoted(_ID)} ID)? {quoted(_ARGS)}" if _ID in self._template else quoted(_ARGS)
            functions = [function_of(tool) for tool in tools]
            rules = f"one: {alternatives('tool', len(tools))}\nID: /[A-Za-z0-9]{{1,32}}/\n" + "".join(
                f"tool_{n}: {quoted(name)} {middle} WS? {arguments_json(schema)}\n"
                for n, (name, schema) in enumerate(functions)
            )
        else:
            rules = 'one: WS? "[" WS? object (WS? "," WS? object)* WS? "]"\n' + call_rules(
                tools, more=r'(WS? "," WS? "\"id\"" WS? ":" WS? /"[A-Za-z0-9]{1,32}"/)?'
            )
        rules = f"mark[lazy]: TEXT {mark}\ncall: mark one (WS? {mark} one)* WS?\n{rules}"
        return turn_grammar(rules, thinking=thinking, marker=mark, ends=True)


def _as_object(call: ToolCall) -> str:
    call_id = f', "id": {json_text(call.id)}' if call.id else ""
    return f'{{"name": {json_text(call.name)}, "arguments": {json_text(call.arguments)}{call_id}}}'


def _read(text: str, marker: re.Match[str]) -> Block:
    start = marker.end()
    try:
        if head := _HEAD.match(text, start):
            arguments, end = read_json(text, head.end())
            nothing_follows(text, end, _MARK)
            return Block([make_call(head.group(1), arguments, head.group(2) or "")], end)
        value, end = read_json(text, start)
        calls = [call_of(item) for item in value] if isinstance(value, list) else [call_of(value)]
        if not calls:
            raise CallError("the list of calls is empty")
        nothing_follows(text, end, _MARK)
        return Block(calls, end)
    except CallError as error:
        following = text.find(_MARK, start)
        return Block([], len(text) if following < 0 else following, str(error))


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            MistralFormat,
            "mistral",
            "[TOOL_CALLS] with a JSON array, or name[ARGS]{…}: Mistral, Mixtral, Ministral, Magistral",
            "mistral-common, instruct tokenizers 3, 11 and 13",
        )
    ]
