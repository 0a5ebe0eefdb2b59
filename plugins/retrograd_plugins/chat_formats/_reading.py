"""Reading an assistant turn: text, reasoning, and blocks that hold calls.

A turn is read from left to right. Text between `<think>` and `</think>` is content, whatever it holds; a
`</think>` without an opening one ends reasoning that the prompt had begun. At a family's marker its own
reader takes over and says where the block ends; what it cannot read becomes the turn's error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import attrs

from retrograd_hookspecs import ParsedTurn, ToolCall

_REASONING = re.compile(r"<think>|</think>")
_SPACES = re.compile(r"\s*")
_SHOWN_CHARACTERS = 80


class CallError(ValueError):
    """A call that cannot be read. The message is an observation for the model, so it is always the same
    for the same text."""


@attrs.frozen
class Block:
    """What a family's reader found: calls, and the index after the block. `error` says what was wrong."""

    calls: Sequence[ToolCall]
    end: int
    error: str = ""


BlockReader = Callable[[str, "re.Match[str]"], "Block | None"]
"""Reads the block at a marker; None if the marker turns out to be ordinary text."""


def read_turn(text: str, marker: re.Pattern[str], read: BlockReader) -> ParsedTurn:
    """Cut a turn into content and calls. A turn without blocks keeps its content as it is; otherwise the
    white space around blocks belongs to neither."""
    content: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    blocks = 0
    kept = position = 0
    thought_over = False
    while True:
        found = marker.search(text, position)
        thought = _REASONING.search(text, position)
        if thought and (found is None or thought.start() < found.start()):
            if thought.group() == "</think>":
                # Reasoning that the prompt had opened: nothing before was meant as a call.
                content, calls, errors, blocks, kept = [], [], [], 0, 0
                position = thought.end()
            else:
                closed = text.find("</think>", thought.end())
                position = len(text) if closed < 0 else closed + len("</think>")
            thought_over = True
            continue
        if found is None:
            break
        block = read(text, found)
        if block is None:
            position = found.end()
            continue
        if block.error and not thought_over:
            closed = text.find("</think>", found.end(), block.end)
            if closed >= 0:  # no call but reasoning that speaks of one; the prompt had opened it
                position = closed
                continue
        blocks += 1
        content.append(text[kept : found.start()])
        calls.extend(block.calls)
        if block.error:
            errors.append(block.error)
        kept = position = max(block.end, found.end())
    if not blocks:
        return ParsedTurn(content=text)
    content.append(text[kept:])
    parts = [part.strip() for part in content]
    return ParsedTurn(
        content="\n".join(part for part in parts if part), tool_calls=tuple(calls), error="; ".join(errors)
    )


def skip_spaces(text: str, position: int) -> int:
    """Index of the next character that is not white space."""
    match = _SPACES.match(text, position)
    return match.end() if match else position


def nothing_follows(text: str, position: int, marker: str = "") -> None:
    """Raises `CallError` unless the turn, but for white space, ends here or goes on with `marker`.

    For formats without a closing tag, where more text means that the call's JSON was not meant so.
    """
    following = skip_spaces(text, position)
    if following < len(text) and not (marker and text.startswith(marker, following)):
        raise CallError(f"after the call something else follows: {_shown(text[following:])}")


def read_json(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at a place and the index after it.

    Stricter than `json`: a key twice, NaN, infinities and lone surrogates are errors. Raises `CallError`.
    """
    try:
        return _DECODER.raw_decode(text, skip_spaces(text, position))
    except json.JSONDecodeError as error:
        raise CallError(f"{error.msg} at character {error.pos - position} of the call's JSON") from None
    except RecursionError:
        raise CallError("the call's JSON is nested too deeply") from None
    except CallError:
        raise
    except ValueError as error:
        raise CallError(f"the call's JSON holds a number that cannot be read: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CallError(f"the key {twice!r} is given twice in one object")
    return result


def _constant(name: str) -> NoReturn:
    raise CallError(f"{name} is not a JSON value")


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise CallError(f"the number {text[:_SHOWN_CHARACTERS]} is out of range")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


def call_of(value: Any, arguments_keys: Sequence[str] = ("arguments", "parameters")) -> ToolCall:
    """The call that a JSON object describes: `name`, one of `arguments_keys`, perhaps `id`.

    Raises `CallError`.
    """
    if not isinstance(value, dict):
        raise CallError(f"a call is an object with name and {arguments_keys[0]}, not {_shown(value)}")
    keys = [key for key in arguments_keys if key in value]
    if "name" not in value:
        raise CallError(f"the call has no name: {_shown(value)}")
    if not keys:
        raise CallError(f"the call of {_shown(value['name'])} has no {arguments_keys[0]}")
    if len(keys) > 1:
        raise CallError(f"the call of {_shown(value['name'])} has both {' and '.join(keys)}")
    call_id = value.get("id", "")
    return make_call(value["name"], value[keys[0]], call_id if isinstance(call_id, str) else "")


def make_call(name: Any, arguments: Any, call_id: str = "") -> ToolCall:
    """A call from its parts, checked. Raises `CallError`."""
    if not isinstance(name, str) or not name:
        raise CallError(f"a call's name is a text, not {_shown(name)}")
    if not isinstance(arguments, dict):
        raise CallError(f"the arguments of {name!r} are an object, not {_shown(arguments)}")
    try:
        json.dumps([name, arguments, call_id], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CallError(f"the call of {name!r} holds a lone surrogate, which is no character") from None
    return ToolCall(name=name, arguments=arguments, id=call_id)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def plain(value: Any) -> Any:
    """The same with dicts and lists instead of other mappings and sequences."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def json_text(value: Any) -> str:
    """JSON as chat templates write it: `, ` and `: `, characters as they are."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
