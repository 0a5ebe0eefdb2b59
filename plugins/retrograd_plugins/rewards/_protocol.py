"""The lines of a reward program: what is sent, and what is accepted as a reply.

Replies are read strictly: a field that is not known, given twice or misspelt is a fault, never a default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from retrograd.line_process import MAX_LINE_BYTES, FaultError, shorten
from retrograd_hookspecs import Answer, Score

PROTOCOL = "retrograd-reward/1"
BATCH = "_retrograd_batch"
INDEX = "_retrograd_index"
BATCH_END = "_retrograd_batch_end"

# Characters that JSON allows in a string and that some line readers (Node's, `str.splitlines`) end a line at.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def encode(record: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 JSON with its newline."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair has no UTF-8, but an escape in JSON
        return json.dumps(record, allow_nan=False).encode() + b"\n"


def request(answer: Answer, echoes: Mapping[str, int]) -> bytes:
    """The line of one answer. Raises `FaultError` if it is too long."""
    line = encode({"prompt": answer.prompt, "completion": answer.completion, **echoes})
    if len(line) - 1 > MAX_LINE_BYTES:
        raise FaultError(
            f"cannot be sent a line of {len(line) - 1:,} bytes: {MAX_LINE_BYTES:,} (8 MiB) is the most"
        )
    return line


def check_handshake(line: bytes) -> None:
    """Raise `FaultError` unless the line echoes the protocol."""
    try:
        reply = parse_object(line)
    except FaultError as fault:
        fault.what = f"did not echo the first line: it {fault.what}"
        raise
    if reply != {"protocol": PROTOCOL}:
        hint = f'echo {{"protocol": "{PROTOCOL}"}} as it is'
        if "reward" in reply:
            hint += ', or set reward_mode = "oneshot" for a program without this line'
        raise FaultError("did not echo the first line", line, hint)


def read_reply(line: bytes, echoes: Mapping[str, int], *, judge_weight: bool) -> Score:
    """The score that a reply gives. Raises `FaultError` for whatever is not exactly a reply.

    Args:
        line: what the program wrote.
        echoes: fields that must come back with these values.
        judge_weight: the reply may carry `judge_weight`.
    """
    reply = parse_object(line)
    if BATCH_END in reply and echoes:
        _check_echo(reply, BATCH_END, echoes[BATCH], line)
        raise FaultError("closed the batch too early: answers are still open", line)
    known = ["reward", *echoes, "judge_weight"]
    _check_fields(reply, known, line)
    for name, expected in echoes.items():
        _check_echo(reply, name, expected, line)
    if "reward" not in reply:
        raise FaultError('wrote a reply without "reward"', line)
    weight = None
    if "judge_weight" in reply:
        if not judge_weight:
            raise FaultError('wrote "judge_weight", but this run has no judge', line)
        weight = _number(reply, "judge_weight", line)
        if weight < 0:
            raise FaultError(f'wrote "judge_weight": {weight}: it must be at least 0', line)
    return Score(kind="value", value=_number(reply, "reward", line), judge_weight=weight)


def check_batch_end(line: bytes, batch: int) -> None:
    """Raise `FaultError` unless the line closes the batch."""
    reply = parse_object(line)
    if INDEX in reply or "reward" in reply:
        raise FaultError("wrote a reply too many", line)
    _check_fields(reply, [BATCH_END], line)
    _check_echo(reply, BATCH_END, batch, line)


def parse_object(line: bytes) -> dict[str, Any]:
    """A JSON object, strictly. Raises `FaultError` for anything else."""
    hint = "its standard output is for replies alone; messages belong on standard error"
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except UnicodeDecodeError as error:
        where = f"byte 0x{line[error.start]:02x} at position {error.start}"
        raise FaultError(f"wrote a line that is not UTF-8 ({where})", line, hint) from None
    except (ValueError, RecursionError) as error:
        if not line.strip():
            raise FaultError("wrote an empty line", line, hint) from None
        raise FaultError(f"wrote a line that is not strict JSON ({error})", line, hint) from None
    if not isinstance(value, dict):
        raise FaultError("wrote a line that is not a JSON object", line, hint)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number; a reward is finite")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return found


def _check_fields(reply: Mapping[str, Any], known: Iterable[str], line: bytes) -> None:
    from retrograd.config.messages import did_you_mean

    names = list(known)
    for name in reply:
        if name not in names:
            raise FaultError(
                f"wrote the unknown field {shorten(name, 60)!r}", line, did_you_mean(name, names)
            )


def _check_echo(reply: Mapping[str, Any], name: str, expected: int, line: bytes) -> None:
    if name not in reply:
        raise FaultError(f"wrote a reply without {name!r}", line, "every reply repeats it from its answer")
    found = reply[name]
    if type(found) is int and found == expected:
        return
    why = ""
    if type(found) is int:
        why = ": a late or second reply" if found < expected else ": replies come in the order of the answers"
    raise FaultError(f"wrote {name!r}: {shorten(json.dumps(found), 60)} where {expected} is due{why}", line)


def _number(reply: Mapping[str, Any], name: str, line: bytes) -> float:
    value = reply[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise FaultError(f"wrote {name!r}: {shorten(json.dumps(value), 60)}: it must be a finite number", line)
