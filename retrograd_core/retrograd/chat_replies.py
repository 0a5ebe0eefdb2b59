"""What a language model wrote, searched for the JSON object that it was asked for."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_REASONING = re.compile(r"<(think|thinking|thought|reasoning|reflection)>.*?</\1>", re.DOTALL | re.IGNORECASE)
# A chat template may have written the opening tag, so that the reply holds the closing one alone.
_CLOSING = re.compile(r"^.*</(?:think|thinking|thought|reasoning|reflection)>", re.DOTALL | re.IGNORECASE)
_SHOWN_CHARS = 200


class ChatError(Exception):
    """There is no usable answer; the message is the reason."""


class ReplyError(ChatError):
    """A reply that is not what was asked for; the message says what is wrong with it."""


def without_reasoning(text: str) -> str:
    """The text without `<think>…</think>` and its like."""
    return _CLOSING.sub("", _REASONING.sub("", text)).strip()


def read_reply(text: str, read: Callable[[Any], T]) -> T:
    """`read(value)` of the JSON object that the text is or holds.

    Prose, reasoning and code fences around it are passed over. Objects that `read` refuses are, too; if
    two that it accepts differ, neither is taken.

    Raises: `ReplyError` if there is no such object, with what was wrong with the last one.
    """
    try:
        return read(json.loads(text))
    except (ValueError, RecursionError):
        pass  # no JSON document; it may hold one
    accepted: list[T] = []
    refused = ""
    for value in _objects(without_reasoning(text)):
        try:
            found = read(value)
        except ReplyError as error:
            refused = str(error)
            continue
        if found not in accepted:
            accepted.append(found)
    if len(accepted) > 1:
        raise ReplyError(f"{len(accepted)} different answers in one reply: {shown(text)}")
    if not accepted:
        raise ReplyError(refused or f"no JSON object in the reply: {shown(text)}")
    return accepted[0]


def _objects(text: str) -> Iterator[Any]:
    """JSON objects in a text that are not inside one another."""
    decoder = json.JSONDecoder()
    position = text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            yield value
        position = text.find("{", end)


def shown(value: Any) -> str:
    """A value in a message, cut with a mark."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return f"{text[:_SHOWN_CHARS]}…" if len(text) > _SHOWN_CHARS else text


def fingerprint(*parts: str) -> str:
    """A hash in hexadecimal digits of texts, the borders between them included."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
