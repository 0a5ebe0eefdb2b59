"""Members of a group as text for a language model, within budgets of characters.

A cut takes the middle and leaves a mark with what is missing, so that neither how an answer begins nor how it
ends is lost, and the judge knows that it does not see everything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from retrograd_hookspecs import JudgeMember, Message


def elide(text: str, limit: int, head_ratio: float) -> str:
    """The text if it has at most `limit` characters, else its two ends with a mark between them.

    `head_ratio` is the share of the kept characters that come from the start. The result is never longer
    than `limit`, unless the mark alone is.
    """
    if len(text) <= limit:
        return text
    # The number of missing characters is part of the mark, so its length is known only within a digit:
    # room is made for the longest.
    longest = _mark(len(text))
    kept = max(0, limit - len(longest))
    head = round(kept * head_ratio)
    tail = kept - head
    return text[:head] + _mark(len(text) - kept) + (text[-tail:] if tail else "")


def _mark(missing: int) -> str:
    return f"\n[… {missing} characters left out …]\n"


def transcript(messages: Sequence[Message], max_message_chars: int, head_ratio: float) -> str:
    """Messages one below the other, each under a line with its role."""
    return "\n\n".join(_message(message, max_message_chars, head_ratio) for message in messages)


def _message(message: Message, limit: int, head_ratio: float) -> str:
    head = message.role if not message.name else f"{message.role} {message.name}"
    parts = [message.content] if message.content else []
    if not message.raw:  # raw content holds the calls as the model wrote them
        parts += [
            f"calls {call.name} {json.dumps(dict(call.arguments), ensure_ascii=False, default=str)}"
            for call in message.tool_calls
        ]
    error = ", error" if message.is_error else ""
    return f"[{head}{error}]\n{elide(chr(10).join(parts) or '(empty)', limit, head_ratio)}"


def with_state(text: str, state: str | None, limit: int, head_ratio: float) -> str:
    """A transcript and the environment's final state within `limit` characters.

    The state gets half of them, or more where the transcript leaves it more.
    """
    if state is None:
        return elide(text, limit, head_ratio)
    title = "\n\n[final state]\n" if text else "[final state]\n"
    room = max(0, limit - len(title))
    state = elide(state, max(room // 2, room - len(text)), head_ratio)
    return elide(text, room - len(state), head_ratio) + title + state


def content_of(member: JudgeMember, include_state: bool) -> str:
    """Everything about a member that a verdict may depend on; equal for members that are equal."""
    messages = [
        [
            m.role,
            m.content,
            [[c.name, dict(c.arguments)] for c in m.tool_calls],
            m.name,
            m.is_error,
            m.raw,
        ]
        for m in member.messages
    ]
    state = member.final_state if include_state else None
    return json.dumps([messages, state], ensure_ascii=False, sort_keys=True, default=str)


def permutation(seed: str, count: int) -> list[int]:
    """An order of `range(count)` that depends on the seed alone, the same on every machine."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{seed}:{i}".encode()).digest())
