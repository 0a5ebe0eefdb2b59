"""Messages that Python code gives, as `Trainer.chat` and `AnswerGroup` take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import attrs

from retrograd_hookspecs import DataError, Message, Problem, ToolCall
from retrograd_hookspecs.text import Role

ROLES: tuple[str, ...] = get_args(Role)
_KEYS = tuple(field.name for field in attrs.fields(Message))


def given_messages(value: str | Sequence[Mapping[str, Any] | Message], where: str) -> tuple[Message, ...]:
    """One user message as text, or messages as a chat JSONL holds them; the model writes what follows.

    Raises: `DataError` with the message and the key that is wrong. `where` names the argument.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise _refused(where, f"expected a text or a list of messages, got {_shown(value)}")
    if not value:
        raise _refused(where, "there are no messages", 'e.g. [{"role": "user", "content": "…"}]')
    messages = tuple(_message(item, f"{where}[{number}]") for number, item in enumerate(value))
    if messages[-1].role not in ("user", "tool"):
        raise _refused(
            f"{where}[{len(messages) - 1}]",
            f"ends on a message of role {messages[-1].role}, and the model answers a user's",
        )
    return messages


def _message(value: Any, where: str) -> Message:
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping):
        raise _refused(where, f"expected an object with role and content, got {_shown(value)}")
    if unknown := [name for name in value if name not in _KEYS]:
        raise _refused(where, f"has the unknown key {unknown[0]!r}", f"known: {', '.join(_KEYS)}")
    if value.get("role") not in ROLES:
        raise _refused(where, f"the role is {_shown(value.get('role'))}", f"one of {', '.join(ROLES)}")
    calls = value.get("tool_calls") or ()
    content = value.get("content")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise _refused(where, f"the content must be a string, is {_shown(content)}")
    bound = tuple(_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls))
    return Message(**{**value, "content": content, "tool_calls": bound})


def _call(value: Any, where: str) -> ToolCall:
    """A call as such, or in OpenAI's shape."""
    if isinstance(value, ToolCall):
        return value
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise _refused(where, f"expected an object with name and arguments, got {_shown(value)}")
    arguments = inner.get("arguments", {})
    if not isinstance(arguments, Mapping):
        raise _refused(where, f"the arguments must be an object, are {_shown(arguments)}")
    return ToolCall(name=inner["name"], arguments=arguments, id=str(value.get("id", "")))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _refused(where: str, message: str, hint: str = "") -> DataError:
    return DataError([Problem(where=where, message=message, hint=hint)])
