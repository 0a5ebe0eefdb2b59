"""Traces as records of chat JSONL: what SFT makes of a record are the tokens of the rollout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from retrograd.agent.trajectory import Trajectory
from retrograd.conversation import ConversationEncoder
from retrograd.records import RecordError
from retrograd_hookspecs import ChatFormat, DataError, Message, TokenizerError
from retrograd_plugins.chat_formats.prompt import PromptFormat
from retrograd_plugins.datasets._conversation import parse_conversation


@attrs.frozen(kw_only=True)
class Trace:
    """A record, its assistant turns, and how many of them are raw."""

    record: dict[str, Any]
    turns: int
    raw_turns: int


class TraceError(Exception):
    """A trajectory that no record reproduces; the message says why."""


class Tracer:
    """Writes traces of local rollouts.

    Args:
        raw: write every turn raw; else only the turns whose tokens the template does not reproduce.
    """

    def __init__(self, encoder: ConversationEncoder, chat_format: ChatFormat, *, raw: bool = False) -> None:
        self._encoder = encoder
        self._chat_format = chat_format
        self._raw = raw

    def trace(self, trajectory: Trajectory) -> Trace:
        """The record with the fewest raw turns that is encoded as the trajectory's own tokens.

        Raises: `TraceError` if there is none.
        """
        messages = _without_open_calls(trajectory)
        places = [index for index, message in enumerate(messages) if message.role == "assistant"]
        raw = set(places) if self._raw else set()
        while True:
            record = self._record(trajectory, messages, raw)
            try:
                differs = self._first_difference(record, trajectory)
            except (RecordError, DataError, TokenizerError) as error:
                differs, why = 0, str(error)
            else:
                why = "encoded anew, its tokens are others"
            if differs is None:
                return Trace(record=record, turns=len(places), raw_turns=len(raw))
            if len(raw) == len(places):
                raise TraceError(why)
            # What the template makes of the first turn that differs, or of those before it, is not what was
            # sampled. Turns that come later may still be written by it.
            turn, inside = _turn_at(trajectory, differs)
            wanted = {places[turn]} if inside else set(places[: turn + 1])
            raw = raw | wanted if wanted - raw else set(places)

    def _first_difference(self, record: Mapping[str, Any], trajectory: Trajectory) -> int | None:
        """Index of the first token in which SFT's sample differs from the rollout; None if none does."""
        conversation = parse_conversation(record, self._chat_format)
        samples = self._encoder.encode(conversation).samples
        found = list(zip(samples[0].tokens, samples[0].trained, strict=True))
        wanted = list(zip(trajectory.tokens, trajectory.trained, strict=True))
        for index, (mine, theirs) in enumerate(zip(found, wanted, strict=False)):
            if mine != theirs:
                return index
        if len(samples) == 1 and len(found) == len(wanted):
            return None
        return min(len(found), len(wanted))

    def _record(self, trajectory: Trajectory, messages: Sequence[Message], raw: set[int]) -> dict[str, Any]:
        written = [
            self._turn(message, index in raw) if message.role == "assistant" else message_record(message)
            for index, message in enumerate(messages)
        ]
        opening = [message_record(message) for message in trajectory.opening]
        return _with_tools([*opening, *written], trajectory)

    def _turn(self, message: Message, raw: bool) -> dict[str, Any]:
        if raw:
            ids = {"token_ids": list(message.token_ids)} if message.token_ids else {}
            return message_record(message) | {"raw": True} | ids
        content = self._chat_format.parse(message.content).content
        return message_record(attrs.evolve(message, content=content))


def structured_trace(trajectory: Trajectory) -> Trace:
    """The record of a trajectory that has no tokens. Raises: `TraceError` if it is none by the rules."""
    messages = _without_open_calls(trajectory)
    record = _with_tools(
        [message_record(message) for message in (*trajectory.opening, *messages)], trajectory
    )
    try:
        parse_conversation(record, cast(ChatFormat, PromptFormat()))
    except RecordError as error:
        raise TraceError(f"{error.key}: {error.message}" if error.key else error.message) from error
    return Trace(record=record, turns=sum(m.role == "assistant" for m in messages), raw_turns=0)


def preference_record(chosen: Trace, rejected: Trace, opening: int) -> dict[str, Any]:
    """A record of preference JSONL; the first `opening` messages are the prompt."""
    record = {
        "prompt": chosen.record["messages"][:opening],
        "chosen": chosen.record["messages"][opening:],
        "rejected": rejected.record["messages"][opening:],
    }
    return record | ({"tools": chosen.record["tools"]} if "tools" in chosen.record else {})


def message_record(message: Message) -> dict[str, Any]:
    """A message as `docs/data.md` has it."""
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        record |= {"tool_call_id": message.tool_call_id, "name": message.name}
    if message.is_error:
        record["is_error"] = True
    return record


def line_of(record: Mapping[str, Any]) -> str:
    """A line of JSONL."""
    return json.dumps(record, ensure_ascii=False, default=dict) + "\n"


def _with_tools(messages: Sequence[Mapping[str, Any]], trajectory: Trajectory) -> dict[str, Any]:
    tools = {"tools": list(trajectory.tools)} if trajectory.tools else {}
    # Through JSON, so that what is checked is what a file will hold.
    record: dict[str, Any] = json.loads(line_of({"messages": list(messages), **tools}))
    return record


def _without_open_calls(trajectory: Trajectory) -> list[Message]:
    """The messages, without the last results if the episode ended before all calls of the turn had run: a
    record answers all calls of its last turn or none."""
    messages = list(trajectory.messages)
    last = max(index for index, message in enumerate(messages) if message.role == "assistant")
    answered = {message.tool_call_id for message in messages[last + 1 :]}
    if any(call.id not in answered for call in messages[last].tool_calls):
        return messages[: last + 1]
    return messages


def _turn_at(trajectory: Trajectory, index: int) -> tuple[int, bool]:
    """The turn that a token belongs to, or that follows it; and whether it is a token of the turn."""
    trained = trajectory.trained
    ends = [
        i for i, (now, after) in enumerate(zip(trained, [*trained[1:], False], strict=True)) if now > after
    ]
    turn = next((number for number, end in enumerate(ends) if index <= end), len(ends) - 1)
    return turn, index < len(trained) and trained[index]
