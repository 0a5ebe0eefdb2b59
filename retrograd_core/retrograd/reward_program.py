"""Write a reward program without its protocol: `serve(function)`::

    from retrograd.reward_program import serve

    def reward(prompt: str, completion: str) -> float:
        return -float(len(completion))

    if __name__ == "__main__":
        serve(reward)

works with `reward_mode` "persistent" and "oneshot". This module needs the standard library alone, so a
program in another environment may copy it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

PROTOCOL = "retrograd-reward/1"
_BATCH_END = "_retrograd_batch_end"
_ECHOED = ("_retrograd_batch", "_retrograd_index")

Record = Mapping[str, Any]


def serve(function: Callable[..., Any], *, batched: bool = False) -> None:
    """Answer the trainer until it closes the input.

    `function(prompt, completion)` returns a finite number; True and False are 1 and 0. With `batched`,
    `function(prompts, completions)` receives all answers of a batch and returns a sequence of as many
    numbers, in their order. Instead of a number a mapping `{"reward": 1.0, "judge_weight": 0.5}` sets the
    weight of the judge for that answer.

    What is printed from here on goes to standard error: standard output belongs to the protocol. An
    exception ends the program with its traceback, and with it the run.

    Raises:
        TypeError, ValueError: the function returned something else.
    """
    requests, replies = _take_over()
    score = _batched(function) if batched else _one_by_one(function)
    with requests, replies:
        for batch in _batches(requests, replies):
            for reply in score(batch):
                _write(replies, reply)


def _take_over() -> tuple[IO[bytes], IO[bytes]]:
    """Input and output of the protocol. File descriptors 0 and 1 become empty input and standard error, for
    whatever prints or starts processes."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.flush()  # what was printed before is no reply either
    return requests, replies


def _batches(requests: IO[bytes], replies: IO[bytes]) -> Iterator[Iterator[Record]]:
    """The answers of each batch; what a batch needs before and after them is written here."""
    first = requests.readline()
    if not first:
        return
    record = json.loads(first)
    if "protocol" not in record:
        yield _oneshot(record, requests)
        return
    if record["protocol"] != PROTOCOL:
        raise ValueError(f"this program speaks {PROTOCOL}, the trainer {record['protocol']}")
    _write(replies, record)
    for line in requests:
        end: dict[str, Any] = {}
        yield _persistent(json.loads(line), requests, end)
        if end:
            _write(replies, end)


def _oneshot(record: Record, requests: IO[bytes]) -> Iterator[Record]:
    yield record
    yield from map(json.loads, requests)


def _persistent(record: Record, requests: IO[bytes], end: dict[str, Any]) -> Iterator[Record]:
    while _BATCH_END not in record:
        yield record
        line = requests.readline()
        if not line:  # the trainer is gone
            return
        record = json.loads(line)
    end.update(record)


def _one_by_one(function: Callable[..., Any]) -> Callable[[Iterator[Record]], Iterator[Record]]:
    def score(batch: Iterator[Record]) -> Iterator[Record]:
        for record in batch:
            yield _reply(record, function(record["prompt"], record["completion"]))

    return score


def _batched(function: Callable[..., Any]) -> Callable[[Iterator[Record]], Iterator[Record]]:
    def score(batch: Iterator[Record]) -> Iterator[Record]:
        records = list(batch)
        rewards: Sequence[Any] = list(
            function([record["prompt"] for record in records], [record["completion"] for record in records])
        )
        if len(rewards) != len(records):
            raise ValueError(
                f"the reward function returned {len(rewards)} rewards for {len(records)} answers"
            )
        yield from map(_reply, records, rewards)

    return score


def _reply(record: Record, reward: Any) -> Record:
    fields = dict(reward) if isinstance(reward, Mapping) else {"reward": reward}
    numbers = {name: _number(name, value) for name, value in fields.items()}
    return {**numbers, **{name: record[name] for name in _ECHOED if name in record}}


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def _write(replies: IO[bytes], record: Record) -> None:
    replies.write(json.dumps(record).encode() + b"\n")
    replies.flush()
