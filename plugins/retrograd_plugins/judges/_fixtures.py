"""Groups with labels, to measure a judge against: JSON Lines.

::

    {"id": "sum", "prompt": "37 + 5?", "members": [{"completion": "42", "label": 1.0},
     {"completion": "32", "label": 0.0}]}

`opening` (messages) may stand for `prompt`, `messages` for `completion`; a group may have a `rubric`, a
member a `final_state`, which alone stands for a trajectory too. Messages are those of chat JSONL, tool calls
included, as `retrograd collect` writes them. Labels are any finite numbers, of which only the order within a
group counts.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs

from retrograd.records import RecordError, kind_of, read_records
from retrograd_hookspecs import ChatFormat, JudgeGroup, JudgeMember, Message, ToolCall
from retrograd_plugins.chat_formats.prompt import PromptFormat
from retrograd_plugins.datasets._conversation import parse_messages

GROUP_KEYS = ("id", "opening", "prompt", "members", "rubric")
MEMBER_KEYS = ("messages", "completion", "label", "final_state")


@attrs.frozen(kw_only=True)
class Fixture:
    """A group and the label of each member."""

    group: JudgeGroup
    labels: tuple[float, ...]


def read_fixtures(path: Path) -> list[Fixture]:
    """Every group of a file. Raises `DataError` with one problem a bad line."""
    seen: dict[str, str] = {}

    def parse(record: dict[str, Any], origin: str) -> Fixture:
        fixture = _fixture(record)
        other = seen.setdefault(fixture.group.id, origin)
        if other != origin:
            raise RecordError(f"the id {fixture.group.id!r} is also that of {other}", key="id")
        return fixture

    return read_records(path, parse)


def _fixture(record: Mapping[str, Any]) -> Fixture:
    _only(record, GROUP_KEYS, "")
    name = record.get("id")
    if not isinstance(name, str) or not name:
        raise RecordError("must be a string that is not empty", key="id", hint="it names the group")
    rubric = _string(record, "rubric", "")
    members = record.get("members")
    if not isinstance(members, list) or len(members) < 2:
        raise RecordError("must be an array of two members or more", key="members")
    parsed = [_member(member, f"members[{index}]") for index, member in enumerate(members)]
    labels = tuple(label for _, label in parsed)
    if len(set(labels)) == 1:
        raise RecordError(f"all labels are {labels[0]:g}: there is no order to agree with", key="members")
    opening = _text_or_messages(record, "prompt", "opening", "user", "")
    group = JudgeGroup(id=name, opening=opening, members=tuple(m for m, _ in parsed), rubric=rubric)
    return Fixture(group=group, labels=labels)


def _member(value: Any, where: str) -> tuple[JudgeMember, float]:
    if not isinstance(value, dict):
        raise RecordError(f"must be an object, is {kind_of(value)}", key=where)
    _only(value, MEMBER_KEYS, where)
    label = value.get("label")
    if isinstance(label, bool) or not isinstance(label, int | float):
        raise RecordError(f"must be a number, is {kind_of(label)}", key=f"{where}.label")
    state = value.get("final_state")
    stated = isinstance(state, str) and "completion" not in value and "messages" not in value
    messages = () if stated else _text_or_messages(value, "completion", "messages", "assistant", where)
    if state is not None and not isinstance(state, str):
        raise RecordError(f"must be a string, is {kind_of(state)}", key=f"{where}.final_state")
    return JudgeMember(messages=messages, final_state=state), float(label)


def _text_or_messages(
    value: Mapping[str, Any], text_key: str, messages_key: str, role: Any, where: str
) -> tuple[Message, ...]:
    given = [name for name in (text_key, messages_key) if name in value]
    if len(given) != 1:
        raise RecordError(f"needs one of {text_key} and {messages_key}, has {len(given)}", key=where)
    if given == [text_key]:
        return (Message(role=role, content=_string(value, text_key, where)),)
    key = f"{where}.{messages_key}" if where else messages_key
    items = value[messages_key]
    if not isinstance(items, list):
        raise RecordError(f"must be an array of messages, is {kind_of(items)}", key=key)
    # A raw turn is shown as it stands; no model is there whose chat format could read it.
    raw = [isinstance(item, dict) and item.get("raw") is True for item in items]
    ours = ("raw", "token_ids")
    plain = [_without(item, *ours) if is_raw else item for item, is_raw in zip(items, raw, strict=True)]
    messages = parse_messages(plain, key, cast(ChatFormat, PromptFormat()))
    return tuple(_named(attrs.evolve(m, raw=is_raw) for m, is_raw in zip(messages, raw, strict=True)))


def _named(messages: Iterable[Message]) -> Iterator[Message]:
    """Results with the name of the tool that gave them, bound by id or by order, as in a rollout."""
    calls: list[ToolCall] = []
    for message in messages:
        if message.role == "assistant":
            calls = list(message.tool_calls)
        elif message.role == "tool" and not message.name:
            wanted = message.tool_call_id
            call = next((call for call in calls if not wanted or call.id == wanted), None)
            if call is not None:
                calls.remove(call)
                message = attrs.evolve(message, name=call.name)
        yield message


def _without(item: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in names}


def _string(value: Mapping[str, Any], name: str, where: str) -> str:
    text = value.get(name, "")
    if not isinstance(text, str):
        raise RecordError(f"must be a string, is {kind_of(text)}", key=f"{where}.{name}".lstrip("."))
    return text


def _only(value: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for name in value:
        if name not in known:
            meant = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"did you mean {meant[0]!r}?" if meant else f"known: {', '.join(known)}"
            raise RecordError(f"has the unknown key {name!r}", key=where, hint=hint)
