"""Tools and tool calls of a record, checked and brought into one shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd.records import RecordError, kind_of, parse_object
from retrograd.tool_prompt import openai_tool
from retrograd_hookspecs import ToolCall

_FUNCTION_KEYS = ("name", "description", "parameters")


def parse_tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Tools in OpenAI's function shape, from that shape or from flat name, description, parameters.

    Raises: `RecordError` for anything else and for two tools of one name.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RecordError(f"must be an array of tools, is {kind_of(value)}", key=where)
    tools = [_tool(item, f"{where}[{index}]") for index, item in enumerate(value)]
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise RecordError(f"the tool {name!r} is given twice", key=f"{where}[{index}]")
        seen.add(name)
    return tuple(tools)


def parse_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    """Calls from `{"id", "type", "function": {"name", "arguments"}}` or flat `{"id", "name", "arguments"}`.

    `arguments` is an object or a JSON string of one. Raises: `RecordError` for anything else and for two
    calls of one id.
    """
    if not isinstance(value, list):
        raise RecordError(f"must be an array of calls, is {kind_of(value)}", key=where)
    calls = tuple(_call(item, f"{where}[{index}]") for index, item in enumerate(value))
    ids = [call.id for call in calls if call.id]
    for call_id in ids:
        if ids.count(call_id) > 1:
            raise RecordError(f"two calls have the id {call_id!r}", key=where)
    return calls


def _tool(value: Any, where: str) -> dict[str, Any]:
    function = _inner(value, where, "name, description and parameters")
    _only(function, (*_FUNCTION_KEYS, "strict"), where)
    name = _name(function, where)
    description = function.get("description", "")
    if not isinstance(description, str):
        raise RecordError(
            f"must be a string, is {kind_of(description)}",
            key=f"{where}.description",
        )
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, dict):
        raise RecordError(
            f"must be a JSON Schema object, is {kind_of(parameters)}", key=f"{where}.parameters"
        )
    if parameters.get("type", "object") != "object":
        raise RecordError(
            f"must describe an object, has the type {parameters['type']!r}", key=f"{where}.parameters"
        )
    return openai_tool(name, description, parameters)


def _call(value: Any, where: str) -> ToolCall:
    identity = value.get("id", "") if isinstance(value, dict) else ""
    if not isinstance(identity, str):
        raise RecordError(f"must be a string, is {kind_of(identity)}", key=f"{where}.id")
    function = _inner(value, where, "name and arguments")
    _only(function, ("name", "arguments", *(() if "function" in value else ("id", "type"))), where)
    if "arguments" not in function:
        raise RecordError("has no arguments", key=where, hint='a call without any has "arguments": {}')
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = parse_object(arguments.encode())
        except RecordError as error:
            raise RecordError(
                f"the JSON string {error.message}", key=f"{where}.arguments", hint=error.hint
            ) from None
    if not isinstance(arguments, dict):
        raise RecordError(
            f"must be an object or a JSON string of one, is {kind_of(arguments)}", key=f"{where}.arguments"
        )
    return ToolCall(name=_name(function, where), arguments=arguments, id=identity)


def _inner(value: Any, where: str, expected: str) -> dict[str, Any]:
    """The object with the name: the value itself or its `function`."""
    if not isinstance(value, dict):
        raise RecordError(f"must be an object with {expected}, is {kind_of(value)}", key=where)
    if value.get("type", "function") != "function":
        raise RecordError(f"has the type {value['type']!r}", key=where, hint='only "function" is known')
    if "function" not in value:
        return {name: child for name, child in value.items() if name != "type"}
    _only(value, ("type", "function", "id"), where)
    function = value["function"]
    if not isinstance(function, dict):
        raise RecordError(
            f"must be an object with {expected}, is {kind_of(function)}", key=f"{where}.function"
        )
    return function


def _only(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in known:
            raise RecordError(f"has the unknown key {name!r}", key=where, hint=f"known: {', '.join(known)}")


def _name(function: Mapping[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RecordError(f"must be a name, is {kind_of(name)}", key=f"{where}.name")
    return name
