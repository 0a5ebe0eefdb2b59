"""Metrics of a run: the always-written `metrics.jsonl`, and the set of sinks behind one call."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from retrograd_hookspecs import Sink

RESERVED = ("step", "time", "nonfinite")
"""Fields of a record that are not metrics."""


class JsonlMetrics:
    """A sink that appends one JSON object a call: `{"step", "time", name: value, …}`.

    `time` is seconds since the epoch. JSON has no NaN: a value that is not finite is written as null and
    named in the record's `nonfinite`, `{name: "nan" | "inf" | "-inf"}`, and counted in
    `nonfinite_values`. A record is one write, so a kill tears at most the last line. Nothing on disk
    changes before the first `write` or `resume`; a new run moves the file of an earlier one aside
    (`metrics.1.jsonl`, …).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nonfinite_values = 0
        self._descriptor: int | None = None
        self._closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a record. Raises `OSError` if it cannot be written whole; then no part of it remains."""
        clash = [name for name in RESERVED if name in metrics]
        if clash:
            raise ValueError(f"a metric cannot be called {clash[0]!r}: it is a field of every record")
        record: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        nonfinite: dict[str, str] = {}
        for name, value in metrics.items():
            number = float(value)
            if math.isfinite(number):
                record[name] = number
            else:
                record[name] = None
                nonfinite[name] = repr(number)
        if nonfinite:
            record["nonfinite"] = nonfinite
            self.nonfinite_values += len(nonfinite)
        self._append(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")

    def resume(self, step: int, records: int | None = None) -> None:
        """Cut the records of later steps, those beyond the first `records`, and a torn last line; then append
        after what remains."""
        self._release()
        if self.path.exists():
            keep = _length_up_to(self.path, step, records)
            with self.path.open("r+b") as file:
                file.truncate(keep)
                os.fsync(file.fileno())
        self._open()

    def close(self) -> None:
        """Flush to the disk and close."""
        self._closed = True
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
        self._release()

    def _append(self, line: str) -> None:
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        if self._descriptor is None:
            _move_aside(self.path)
            self._open()
        descriptor = self._descriptor
        assert descriptor is not None
        start = os.fstat(descriptor).st_size
        data = memoryview(line.encode())
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, start)
            raise

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a `metrics.jsonl`, oldest first; a torn last line is left out."""
    with path.open("rb") as file:
        for line in file:
            record = _record(line)
            if record is not None:
                yield record


class SinkSet:
    """All sinks of a run behind one call.

    A sink that raises is switched off with one warning; the others and the run go on.
    """

    def __init__(self, sinks: Mapping[str, Sink], warn: Callable[[str], None]) -> None:
        self._sinks = dict(sinks)
        self._warn = warn
        self.switched_off: list[str] = []

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the sinks that still receive metrics."""
        return tuple(self._sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the metrics of one step, evaluation or event to every sink."""
        self._each("write", lambda sink: sink.write(step, metrics))

    def resume(self, step: int, records: int) -> None:
        """Tell every sink that the run goes on after `step`. `metrics.jsonl`, which has a record a call of
        `write`, keeps the first `records`: updates without a step leave several at one step."""

        def resume(sink: Sink) -> None:
            if isinstance(sink, JsonlMetrics):
                sink.resume(step, records)
            else:
                sink.resume(step)

        self._each("resume", resume)

    def close(self) -> None:
        """Close every sink; may be called more than once."""
        self._each("close", lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, action: str, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:
                del self._sinks[name]
                self.switched_off.append(name)
                self._warn(
                    f"metrics sink {name!r} failed in {action} ({type(error).__name__}: {error}) and is"
                    " switched off; the run goes on without it"
                )
                with contextlib.suppress(Exception):
                    sink.close()


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a complete line, else None."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _length_up_to(path: Path, step: int, records: int | None) -> int:
    """Bytes to keep: everything before the first record of a later step, at most `records`, without a torn
    last line."""
    length = kept = count = 0
    with path.open("rb") as file:
        for line in file:
            length += len(line)
            record = _record(line)
            if record is not None:
                if record["step"] > step or count == records:
                    return kept
                kept = length
                count += 1
    return kept


def _move_aside(path: Path) -> None:
    """Rename an existing file to the first free `NAME.N.SUFFIX`: a new run never mixes with an old one."""
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
