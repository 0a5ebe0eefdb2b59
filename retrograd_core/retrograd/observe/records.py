"""The records of `observe.jsonl`: rollouts as JSON objects.

Every record has `v` (the version of the format), `kind`, `time` (seconds since the epoch) and `segment`
(which start or resume of the run wrote it). `docs/observing.md` describes each kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from retrograd_hookspecs import Message, Rollout, RolloutGroup, Score, ToolCall

from .pieces import Decode

VERSION = 1

Record = dict[str, Any]


@attrs.frozen
class Stamp:
    """What every record starts with, but for its kind."""

    time: float
    segment: int

    def record(self, kind: str, **fields: Any) -> Record:
        """A record of a kind."""
        return {"v": VERSION, "kind": kind, "time": round(self.time, 3), "segment": self.segment, **fields}


def line(record: Record) -> bytes:
    """One line of JSON. A surrogate that stands alone becomes its JSON escape."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def metric_fields(metrics: Mapping[str, float]) -> Record:
    """`metrics`, and `nonfinite` by name for values that JSON has no number for; those are null."""
    values = {name: float(value) for name, value in metrics.items()}
    nonfinite = {name: repr(value) for name, value in values.items() if not math.isfinite(value)}
    fields: Record = {"metrics": {name: None if name in nonfinite else v for name, v in values.items()}}
    if nonfinite:
        fields["nonfinite"] = nonfinite
    return fields


def count_records(groups: Sequence[RolloutGroup]) -> int:
    """How many records `group_records` makes of the groups."""
    return sum(2 + 2 * len(group.members) for group in groups)


def group_records(
    group: RolloutGroup, stamp: Stamp, *, update: int, split: str, max_text_chars: int, decode: Decode
) -> Iterator[Record]:
    """The records of a group: `prompt`, then `rollout` and `outcome` of each member, then `selection`.

    Args:
        split: "train", or "eval" for held-out prompts.
        max_text_chars: longest text, in characters; 0 keeps texts whole.
        decode: texts of token ids, one a token.
    """
    common = {"update": update, "group": group.id}
    texts = _Texts(max_text_chars)
    yield texts.close(
        stamp.record(
            "prompt",
            **common,
            split=split,
            source=group.source,
            messages=[texts.message(message) for message in group.messages],
            rubric=texts.cut(group.rubric),
            prompt_tokens=group.prompt_tokens,
            metadata=texts.value(group.metadata),
        )
    )
    for member in group.members:
        own = {**common, "member": member.id}
        yield _rollout(member, stamp, own, group.prompt_tokens, max_text_chars, decode)
        yield _outcome(member, stamp, own, group.prompt_tokens, max_text_chars)
    yield stamp.record(
        "selection",
        **common,
        dropped=group.dropped,
        trained=[] if group.dropped else [member.id for member in group.members if not member.excluded],
        excluded={member.id: member.excluded for member in group.members if member.excluded},
    )


def _rollout(
    member: Rollout, stamp: Stamp, own: Record, prompt_tokens: int, max_text_chars: int, decode: Decode
) -> Record:
    texts = _Texts(max_text_chars)
    fields: Record = {"completion": texts.cut(member.completion), "finish": member.finish}
    if not _is_plain(member):
        fields["messages"] = [texts.message(message) for message in member.messages]
    fields["tokens"] = _tokens(member, prompt_tokens, max_text_chars, decode)
    fields |= metric_fields(member.metrics)
    return texts.close(stamp.record("rollout", **own, **fields))


def _is_plain(member: Rollout) -> bool:
    """The messages say nothing that the completion does not."""
    return member.messages == (Message(role="assistant", content=member.completion),)


def _tokens(member: Rollout, prompt_tokens: int, max_text_chars: int, decode: Decode) -> Record:
    """What follows the prompt; indices count from its end."""
    trained = member.trained[prompt_tokens:]
    record: Record = {"count": len(trained), "trained_count": int(trained.sum())}
    pieces = decode(member.tokens[prompt_tokens:].tolist())
    shown = len(pieces)
    if max_text_chars:
        ends = np.cumsum([len(piece) for piece in pieces])
        shown = int(np.searchsorted(ends, max_text_chars, side="right"))
    trained = trained[:shown]
    record["pieces"] = pieces[:shown]
    record["trained"] = _spans(trained)
    record["logp"] = [_rounded(value, 4) for value in member.logp[prompt_tokens:][:shown][trained]]
    if member.advantage is not None:
        record["advantage"] = _constant_or_list(
            member.advantage[prompt_tokens:][member.trained[prompt_tokens:]], int(trained.sum())
        )
    return record


def _spans(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> list[list[int]]:
    """`[start, length]` of each stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [[int(start), int(stop - start)] for start, stop in edges.reshape(-1, 2)]


def _constant_or_list(
    values: np.ndarray[Any, np.dtype[np.float64]], shown: int
) -> float | list[float | None] | None:
    if len(values) and np.all(values == values[0]):
        return _rounded(values[0], 6)
    return [_rounded(value, 6) for value in values[:shown]]


def _outcome(member: Rollout, stamp: Stamp, own: Record, prompt_tokens: int, max_text_chars: int) -> Record:
    texts = _Texts(max_text_chars)
    fields: Record = {"reward": texts.score(member.reward)}
    if member.judgement is not None:
        fields["judgement"] = texts.score(member.judgement)
    fields["total"] = None if member.total is None else _rounded(member.total, 9)
    if member.step_rewards:
        fields["step_rewards"] = [
            [int(index) - prompt_tokens, _rounded(reward, 9)] for index, reward in member.step_rewards
        ]
    return texts.close(stamp.record("outcome", **own, **fields))


def _rounded(value: float, digits: int) -> float | None:
    """None for a value that is not finite."""
    return round(float(value), digits) if math.isfinite(value) else None


class _Texts:
    """Cuts the texts of one record and counts what it took off."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._cut = 0

    def close(self, record: Record) -> Record:
        """The record, with `cut_chars` if anything was cut."""
        return {**record, "cut_chars": self._cut} if self._cut else record

    def cut(self, text: str) -> str:
        excess = len(text) - self._limit
        if not self._limit or excess <= 0:
            return text
        self._cut += excess
        return f"{text[: self._limit]}… [{excess} more characters]"

    def value(self, value: Any) -> Any:
        """A JSON value with its texts cut; what JSON has no form for becomes text."""
        if isinstance(value, str):
            return self.cut(value)
        if isinstance(value, Mapping):
            return {str(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        return self.cut(str(value))

    def message(self, message: Message) -> Record:
        """The fields that say something."""
        record: Record = {"role": message.role, "content": self.cut(message.content)}
        if message.tool_calls:
            record["tool_calls"] = [self._call(call) for call in message.tool_calls]
        for name in ("tool_call_id", "name", "is_error", "raw"):
            if value := getattr(message, name):
                record[name] = value
        return record

    def score(self, score: Score) -> Record:
        """`kind`, the value where there is one, and the explanation."""
        record: Record = {"kind": score.kind}
        if score.kind == "value":
            record["value"] = _rounded(score.value, 9)
        if score.explanation:
            record["explanation"] = self.cut(score.explanation)
        if score.judge_weight is not None:
            record["judge_weight"] = score.judge_weight
        return record

    def _call(self, call: ToolCall) -> Record:
        record: Record = {"name": call.name, "arguments": self.value(call.arguments)}
        if call.id:
            record["id"] = call.id
        return record
