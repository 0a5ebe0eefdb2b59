"""A chat record checked and turned into messages: the rules of the chat format."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import attrs

from retrograd.conversation import Conversation
from retrograd.records import RecordError, kind_of
from retrograd.tool_prompt import call_id
from retrograd_hookspecs import ChatFormat, Message, Role, ToolCall

from ._tools import parse_calls, parse_tools

ROLES: tuple[str, ...] = get_args(Role)
RECORD_KEYS = ("messages", "tools", "rubric")
MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "is_error", "raw", "token_ids")
_ROLE_OF_KEY = {
    "tool_calls": "assistant",
    "raw": "assistant",
    "token_ids": "assistant",
    "tool_call_id": "tool",
    "is_error": "tool",
}


def parse_conversation(record: Mapping[str, Any], chat_format: ChatFormat) -> Conversation:
    """The messages and tools of a training record.

    Raises: `RecordError` for the first rule of the format that the record breaks.
    """
    tools = parse_tools(record.get("tools"), "tools")
    messages = parse_messages(_messages_of(record), "messages", chat_format)
    messages = bind_calls(messages, "messages")
    check_order(messages, "messages")
    check_answered(messages, "messages")
    return Conversation(messages=tuple(messages), tools=tools)


def unknown_keys(record: Mapping[str, Any]) -> list[str]:
    """Keys of a record that the format does not read."""
    return [name for name in record if name not in RECORD_KEYS]


def parse_messages(value: Any, where: str, chat_format: ChatFormat) -> list[Message]:
    """Messages one by one, without looking at their order."""
    if not isinstance(value, list):
        raise RecordError(f"must be an array of messages, is {kind_of(value)}", key=where)
    if not value:
        raise RecordError("is empty", key=where, hint="a record needs a user and an assistant message")
    return [_message(item, f"{where}[{index}]", chat_format) for index, item in enumerate(value)]


def check_order(messages: Sequence[Message], where: str) -> None:
    """System messages lead; then user and assistant alternate, observations apart. Raises `RecordError`."""
    expected: tuple[Role, ...] = ("user",)
    previous = "system"
    for index, message in enumerate(messages):
        key = f"{where}[{index}]"
        if message.role == "system":
            if previous != "system":
                raise RecordError(
                    f"a system message after a {previous} message",
                    key=key,
                    hint="system messages come first",
                )
        elif message.role == "tool":
            # That it answers a call is checked where calls are bound; the next turn may be either's.
            expected = ("user", "assistant")
        elif message.role not in expected:
            raise RecordError(
                f"the role is {message.role!r}, where {' or '.join(expected)} must follow",
                key=key,
                hint="after leading system messages user and assistant alternate",
            )
        else:
            expected = ("assistant",) if message.role == "user" else ("user",)
        previous = message.role


def bind_calls(messages: Sequence[Message], where: str) -> list[Message]:
    """Give every call an id, and every observation the id and name of the call that it answers.

    Raises: `RecordError` for an observation without a call, and for a call that is not answered before the
    next message that is not an observation.
    """
    bound: list[Message] = []
    waiting: list[ToolCall] = []
    calls = 0
    for index, message in enumerate(messages):
        key = f"{where}[{index}]"
        if message.role == "tool":
            call = _call_answered_by(message, waiting, key)
            waiting.remove(call)
            bound.append(attrs.evolve(message, tool_call_id=call.id, name=call.name))
            continue
        _check_none_waiting(waiting, key)
        waiting = []
        for call in message.tool_calls:
            waiting.append(call if call.id else attrs.evolve(call, id=call_id(calls)))
            calls += 1
        bound.append(attrs.evolve(message, tool_calls=tuple(waiting)))
    if messages[-1].role == "tool":
        _check_none_waiting(waiting, f"{where}[{len(messages) - 1}]")
    return bound


def check_answered(messages: Sequence[Message], where: str) -> None:
    """A training record ends on an assistant turn or on the results of its calls. Raises `RecordError`."""
    if messages[-1].role not in ("assistant", "tool"):
        raise RecordError(
            f"the record ends on a {messages[-1].role} message, which nothing answers",
            key=f"{where}[{len(messages) - 1}]",
            hint="end it on the assistant's answer",
        )


def _messages_of(record: Mapping[str, Any]) -> Any:
    for name in unknown_keys(record):
        absent = [known for known in RECORD_KEYS if known not in record]
        meant = difflib.get_close_matches(name, absent, n=1, cutoff=0.8)
        if meant:
            raise RecordError(f"has the unknown key {name!r}", hint=f"did you mean {meant[0]!r}?")
    if "messages" not in record:
        raise RecordError(
            f"has no messages; its keys are {', '.join(map(repr, record)) or 'none'}",
            hint='expected {"messages": [{"role": "user", "content": "…"}, …]}',
        )
    return record["messages"]


def _message(value: Any, where: str, chat_format: ChatFormat) -> Message:
    if not isinstance(value, dict):
        raise RecordError(f"must be an object with role and content, is {kind_of(value)}", key=where)
    role = value.get("role")
    if role not in ROLES:
        shown = kind_of(role) if not isinstance(role, str) else repr(role)
        raise RecordError(f"the role is {shown}", key=f"{where}.role", hint=f"one of {', '.join(ROLES)}")
    _check_keys(value, role, where)
    calls = parse_calls(value["tool_calls"], f"{where}.tool_calls") if value.get("tool_calls") else ()
    message = Message(
        role=role,
        content=_content(value, role, bool(calls), where),
        tool_calls=calls,
        tool_call_id=_string(value, "tool_call_id", where),
        name=_string(value, "name", where),
        is_error=_boolean(value, "is_error", where),
        raw=_boolean(value, "raw", where),
        token_ids=_token_ids(value, where),
    )
    return _read_raw(message, "tool_calls" in value, where, chat_format) if message.raw else message


def _check_keys(value: Mapping[str, Any], role: str, where: str) -> None:
    for name in value:
        if name not in MESSAGE_KEYS:
            meant = difflib.get_close_matches(name, MESSAGE_KEYS, n=1, cutoff=0.75)
            hint = f"did you mean {meant[0]!r}?" if meant else f"known: {', '.join(MESSAGE_KEYS)}"
            if name in ("reasoning_content", "reasoning", "thinking"):
                hint = "reasoning stands in the content, as the model writes it: <think>…</think>"
            raise RecordError(f"has the unknown key {name!r}", key=where, hint=hint)
        only = _ROLE_OF_KEY.get(name, role)
        if only != role and value[name]:
            raise RecordError(f"{name} belongs to {only} messages, this is a {role} message", key=where)


def _content(value: Mapping[str, Any], role: str, has_calls: bool, where: str) -> str:
    content = value.get("content")
    if content is None and has_calls:
        return ""
    if content is None:
        raise RecordError("has no content" if "content" not in value else "the content is null", key=where)
    if not isinstance(content, str):
        hint = "only text is supported: write its parts as one string" if isinstance(content, list) else ""
        raise RecordError(f"must be a string, is {kind_of(content)}", key=f"{where}.content", hint=hint)
    # A tool may answer nothing, and a turn may consist of its calls alone.
    if not content.strip() and role != "tool" and not has_calls:
        raise RecordError("is empty" if not content else "is only white space", key=f"{where}.content")
    return content


def _read_raw(message: Message, calls_given: bool, where: str, chat_format: ChatFormat) -> Message:
    """The calls that a raw turn's text makes, checked against those that the record lists."""
    if not message.content:
        raise RecordError("a raw turn holds its exact text, which is empty", key=f"{where}.content")
    parsed = chat_format.parse(message.content)
    if parsed.error:
        raise RecordError(
            f"the model's chat format {chat_format.name!r} cannot read the raw turn: {parsed.error}",
            key=f"{where}.content",
        )
    if calls_given and _comparable(parsed.tool_calls) != _comparable(message.tool_calls):
        raise RecordError(
            f"the raw text makes the calls {_shown(parsed.tool_calls)}, tool_calls lists"
            f" {_shown(message.tool_calls)} (read as {chat_format.name!r})",
            key=where,
            hint="make them equal, or leave tool_calls out",
        )
    return message if calls_given else attrs.evolve(message, tool_calls=tuple(parsed.tool_calls))


def _comparable(calls: Sequence[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in calls]


def _shown(calls: Sequence[ToolCall]) -> str:
    texts = [f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in calls]
    text = ", ".join(texts) or "none"
    return text if len(text) <= 120 else text[:119] + "…"


def _call_answered_by(message: Message, waiting: Sequence[ToolCall], key: str) -> ToolCall:
    if not waiting:
        raise RecordError(
            "an observation without a call: every call before it is answered already",
            key=key,
            hint="a tool message follows the assistant message whose tool_calls it answers",
        )
    if message.tool_call_id:
        found = [call for call in waiting if call.id == message.tool_call_id]
        if not found:
            ids = ", ".join(repr(call.id) for call in waiting)
            raise RecordError(
                f"answers the call {message.tool_call_id!r}, which is not among those waiting ({ids})",
                key=f"{key}.tool_call_id",
                hint="use a waiting call's id, or leave tool_call_id out to answer in order",
            )
        call = found[0]
    else:
        call = waiting[0]
    if message.name and message.name != call.name:
        raise RecordError(
            f"is named {message.name!r} but answers a call of {call.name!r}",
            key=f"{key}.name",
            hint="leave the name out, or bind the message by tool_call_id",
        )
    return call


def _check_none_waiting(waiting: Sequence[ToolCall], key: str) -> None:
    if waiting:
        names = ", ".join(f"{call.name} ({call.id})" for call in waiting)
        raise RecordError(
            f"calls are not answered by then: {names}",
            key=key,
            hint="put one tool message for each call right after the assistant message",
        )


def _string(value: Mapping[str, Any], name: str, where: str) -> str:
    text = value.get(name)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise RecordError(f"must be a string, is {kind_of(text)}", key=f"{where}.{name}")
    return text


def _token_ids(value: Mapping[str, Any], where: str) -> tuple[int, ...]:
    ids = value.get("token_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise RecordError("must be an array of token ids", key=f"{where}.token_ids")
    if not value.get("raw"):
        raise RecordError("belongs to raw turns", key=f"{where}.token_ids", hint='add "raw": true')
    return tuple(ids)


def _boolean(value: Mapping[str, Any], name: str, where: str) -> bool:
    flag = value.get(name, False)
    if not isinstance(flag, bool):
        raise RecordError(f"must be true or false, is {kind_of(flag)}", key=f"{where}.{name}")
    return flag
