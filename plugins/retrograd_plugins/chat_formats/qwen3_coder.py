"""Qwen 3 Coder: parameters as elements, texts unquoted.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

A value carries no type. One that is JSON other than a text is read as that (`5`, `true`, `[1]`), and so are
Python's `True`, `False`, `None`, which the model's template writes; everything else is text. A text that
looks like JSON (`"5"`) can therefore not be told from a number; `ToolCall.texts` keeps it as it was written,
for tools whose schema asks for a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from retrograd_hookspecs import Component, ParsedTurn, ToolCall, hookimpl

from ._base import FormatBase, component
from ._grammar import alternatives, function_of, quoted, turn_grammar
from ._qwen3_coder_values import parameter_rules
from ._reading import Block, CallError, json_text, make_call, read_json, read_turn, skip_spaces

_MARKER = re.compile(r"<tool_call>\s*(?=<function=)|<function=|<tool_call>")
_FUNCTION = re.compile(r"<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_PYTHON = {"True": True, "False": False, "None": None}


class Qwen3CoderFormat(FormatBase):
    """`<function=…>` with `<parameter=…>` elements inside `<tool_call>`."""

    name = "qwen3_coder"

    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        return "<function=" in template and "<parameter=" in template

    def parse(self, text: str) -> ParsedTurn:
        return read_turn(text, _MARKER, _read)

    def _write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(_written(call) for call in calls)

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> str:
        """Elements with the parameters in the order of the schema; texts as they are, other values as JSON.

        Raises `RolloutError` for a parameter that no rule can describe, such as a text with a pattern.
        """
        lines = [
            'wrapped[lazy]: TEXT "<tool_call>"',
            'bare[lazy]: TEXT "<function="',
            'call: wrapped WS? "<function=" function WS? "</tool_call>" | bare function',
            f'function: ({alternatives("tool", len(tools))}) WS? "</function>"',
            'text[lazy]: ANY "</parameter>"',
        ]
        for number, (name, schema) in enumerate(map(function_of, tools)):
            parts, rules = parameter_rules(f"tool_{number}", name, schema)
            lines += [f"tool_{number}: {quoted(f'{name}>')} WS? {parts}", *rules]
        marker = '"<tool_call>" | "<function="'
        return turn_grammar("\n".join(lines), thinking=thinking, marker=marker)


def _read(text: str, marker: re.Match[str]) -> Block:
    wrapped = marker.group().startswith("<tool_call>")
    start = marker.end() if wrapped else marker.start()
    try:
        function = _FUNCTION.match(text, start)
        if function is None:
            raise CallError("after <tool_call> comes <function=NAME>")
        end = function.end()
        arguments: dict[str, Any] = {}
        texts: dict[str, str] = {}
        while parameter := _PARAMETER.match(text, end):
            key, value = parameter.groups()
            if key in arguments:
                raise CallError(f"the parameter {key!r} is given twice")
            arguments[key] = _value(value)
            if not isinstance(arguments[key], str):
                texts[key] = value
            end = parameter.end()
        for tag in ("</function>", "</tool_call>") if wrapped else ("</function>",):
            end = skip_spaces(text, end)
            if not text.startswith(tag, end):
                raise CallError(f"the call of {function.group(1)!r} has no {tag} where it should end")
            end += len(tag)
        return Block([attrs.evolve(make_call(function.group(1), arguments), texts=texts)], end)
    except CallError as error:
        close = "</tool_call>" if wrapped else "</function>"
        closed = text.find(close, start)
        return Block([], len(text) if closed < 0 else closed + len(close), str(error))


def _value(text: str) -> Any:
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        value, end = read_json(text, 0)
    except CallError:
        return text
    return text if isinstance(value, str) or end != len(text) or text[:1].isspace() else value


def _written(call: ToolCall) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json_text(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


@hookimpl
def retrograd_chat_formats() -> list[Component[Any, Any]]:
    return [
        component(
            Qwen3CoderFormat,
            "qwen3_coder",
            "Elements <function=…> and <parameter=…>: Qwen 3 Coder",
            "Qwen 3 Coder chat template",
        )
    ]
