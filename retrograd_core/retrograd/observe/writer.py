"""Recording a run for reading, beside the run: nothing here slows it or stops it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import attrs

from retrograd_hookspecs import RolloutGroup

from .journal import Journal
from .page import Page
from .pieces import Decode
from .records import Record, Stamp, count_records, group_records, line, metric_fields

MAX_PENDING_ROLLOUTS = 4
"""Updates whose rollouts wait for the disk; further ones are dropped and counted."""

MAX_PENDING = 10_000
"""Records without rollouts that wait for the disk."""

CLOSE_SECONDS = 10.0
"""Longest wait for the disk at the end of a run."""


class Recorder(Protocol):
    """Takes what a run wants recorded. No call waits for a disk, and none raises because of one."""

    def run(self, *, settings: Mapping[str, Any], resumed: bool = False) -> None:
        """The run starts, or goes on after a resume: the first call."""

    def wants(self, update: int) -> bool:
        """True if the rollouts of this update would be recorded."""

    def update(self, update: int, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        """An update ended; the first is 1. The groups may be changed afterwards."""

    def evaluation(
        self, update: int, metrics: Mapping[str, float], groups: Sequence[RolloutGroup] = ()
    ) -> None:
        """An evaluation after `update` ended; `groups` are held-out prompts with their answers."""

    def close(self) -> None:
        """Write what is left; may be called more than once."""


class NullObserver:
    """Records nothing: a run without `[observe]`."""

    def run(self, *, settings: Mapping[str, Any], resumed: bool = False) -> None:
        pass

    def wants(self, update: int) -> bool:
        return False

    def update(self, update: int, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        pass

    def evaluation(
        self, update: int, metrics: Mapping[str, float], groups: Sequence[RolloutGroup] = ()
    ) -> None:
        pass

    def close(self) -> None:
        pass


@attrs.frozen(kw_only=True)
class RunFacts:
    """What identifies a run: its algorithm, the name of its base model, the path of its result."""

    algorithm: str
    model: str
    output: str


@attrs.frozen(kw_only=True)
class _Job:
    """Records to be made and written together."""

    time: float
    kind: str
    update: int
    fields: Record
    groups: Sequence[RolloutGroup] = ()

    @property
    def records(self) -> int:
        return 1 + count_records(self.groups)


class Observer:
    """Writes `observe.jsonl` and the page that shows it, in a thread of its own.

    A failure is reported once. Records that cannot be written are dropped and counted; the count is written
    as a `gap` record once writing works again, and reported at the end.

    Args:
        decode: texts of token ids, one a token.
        message: takes a line for the person who watches; called in any thread, must not raise.
        every: rollouts of updates 1, 1 + every, 1 + 2·every, … are recorded.
        max_text_chars: longest text, in characters; 0 keeps texts whole.
    """

    def __init__(
        self,
        directory: Path,
        facts: RunFacts,
        *,
        decode: Decode,
        message: Callable[[str], None],
        every: int = 1,
        max_text_chars: int = 0,
    ) -> None:
        self._directory = directory
        self._facts = facts
        self._decode = decode
        self._message = message
        self._every = every
        self._max_text_chars = max_text_chars
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._dropped_waiting = 0
        self._thread: threading.Thread | None = None
        # What follows belongs to the thread.
        self._start: tuple[float, Record] = (0.0, {})
        self._journal: Journal | None = None
        self._page: Page | None = None
        self._segment = 0
        self._gap = 0
        self._gap_reason = ""
        self._dropped = 0
        self._failure = ""
        self._page_failure = ""

    def run(self, *, settings: Mapping[str, Any], resumed: bool = False) -> None:
        """The run starts, or goes on after a resume: a new segment."""
        if self._thread is not None:
            raise ValueError("an observer records one start of a run")
        self._start = (
            time.time(),
            {
                **attrs.asdict(self._facts),
                "version": _version(),
                "resumed": resumed,
                "every": self._every,
                "max_text_chars": self._max_text_chars,
                "settings": {key: _plain(value) for key, value in settings.items()},
            },
        )
        self._journal = Journal(self._directory, output=self._facts.output, resumed=resumed)
        self._thread = threading.Thread(target=self._work, name="observe", daemon=True)
        self._thread.start()

    def wants(self, update: int) -> bool:
        """True if the rollouts of this update would be recorded."""
        return (update - 1) % self._every == 0

    def update(self, update: int, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        """An update ended; the first is 1. The groups may be changed afterwards."""
        self._put("update", update, groups if self.wants(update) else (), metrics)

    def evaluation(
        self, update: int, metrics: Mapping[str, float], groups: Sequence[RolloutGroup] = ()
    ) -> None:
        """An evaluation after `update` ended; `groups` are held-out prompts with their answers."""
        self._put("evaluation", update, groups, metrics)

    def close(self) -> None:
        """Write what is left, for at most `CLOSE_SECONDS`, and report what was dropped."""
        with self._wake:
            if self._closing or self._thread is None:
                self._closing = True
                return
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_SECONDS)
        with self._wake:
            waiting = sum(job.records for job in self._jobs) if self._thread.is_alive() else 0
            lost = self._dropped + self._dropped_waiting
            self._dropped_waiting = 0
        if waiting:
            self._message(
                f"observe: {self._directory} is still being written to after {CLOSE_SECONDS:.0f} s;"
                f" {waiting} records may be lost"
            )
        if lost:
            self._message(f"observe: {lost} records were dropped ({self._gap_reason or self._failure})")
        if self._page_failure:
            self._message(
                f"observe: the page in {self._directory} is not complete ({self._page_failure});"
                f" `retrograd view {self._directory}` shows everything"
            )

    def _put(
        self, kind: str, update: int, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]
    ) -> None:
        if self._thread is None or self._closing:
            raise ValueError("an observer records between `run` and `close`")
        fields = {"update": update, **metric_fields(metrics), "rollouts": bool(groups)}
        job = _Job(time=time.time(), kind=kind, update=update, fields=fields, groups=groups)
        report = False
        with self._wake:
            if groups and sum(1 for waiting in self._jobs if waiting.groups) >= MAX_PENDING_ROLLOUTS:
                self._dropped_waiting += count_records(groups)
                job = attrs.evolve(job, groups=(), fields={**fields, "rollouts": False})
            if len(self._jobs) >= MAX_PENDING:
                self._dropped_waiting += job.records
            else:
                self._jobs.append(attrs.evolve(job, groups=[_copy(group) for group in job.groups]))
                self._wake.notify()
            if self._dropped_waiting and not self._failure:
                self._failure = "the disk is slower than the run"
                report = True
        if report:
            self._report_first(self._failure)

    def _report_first(self, reason: str) -> None:
        self._message(
            f"observe: recording into {self._directory} fails ({reason}); the run goes on, and what cannot be"
            " written is dropped and counted"
        )

    def _work(self) -> None:
        """The thread: open the file, then write job after job until the end."""
        self._attempt(None)
        while True:
            with self._wake:
                while not self._jobs and not self._closing:
                    self._wake.wait()
                if not self._jobs:
                    break
                job = self._jobs[0]
                self._gap += self._dropped_waiting
                self._dropped += self._dropped_waiting
                if self._dropped_waiting:
                    self._gap_reason = "the disk is slower than the run"
                self._dropped_waiting = 0
            self._attempt(job)
            with self._wake:
                self._jobs.popleft()
        self._end()

    def _attempt(self, job: _Job | None) -> None:
        """Write a job (None: only the start of the run). Nothing that fails leaves this method."""
        try:
            self._open()
            if job is not None:
                self._append(job)
        except Exception as error:
            self._lost(job.records if job is not None else 0, error)
            return
        if self._page is None:
            return
        try:
            self._page.catch_up()
        except Exception as error:
            first = not self._page_failure
            self._page_failure = _reason(error)
            if first:
                self._message(
                    f"observe: the page in {self._directory} cannot be brought up to date"
                    f" ({self._page_failure}); the run and its records go on"
                )
        else:
            self._page_failure = ""

    def _open(self) -> None:
        """Have the file open with the `run` record of this segment in it."""
        journal = self._journal
        assert journal is not None
        if not journal.is_open:
            journal.open()
            self._announce(journal)
        if self._segment and not journal.is_empty():
            return
        opening = journal.opening
        at, fields = self._start
        record = Stamp(at, opening.segment).record("run", run=opening.run_id, **fields)
        if opening.torn_bytes:
            record["torn_bytes"] = opening.torn_bytes
        journal.append(line(record))
        self._segment = opening.segment

    def _announce(self, journal: Journal) -> None:
        """Say once what the file was found to be."""
        if self._page is not None:
            return
        self._page = Page(journal.path)
        self._directory = journal.directory
        opening = journal.opening
        if opening.other is not None:
            self._message(
                f"observe: another run records into {opening.other}; this one is recorded in"
                f" {journal.directory}"
            )
        if opening.torn_bytes:
            self._message(
                f"observe: {journal.path} ended in a torn record: {opening.torn_bytes} bytes were cut off"
            )

    def _append(self, job: _Job) -> None:
        assert self._journal is not None
        self._journal.append(b"".join(map(line, self._records(job))))
        self._gap = 0

    def _records(self, job: _Job) -> Iterator[Record]:
        stamp = Stamp(job.time, self._segment)
        if self._gap:
            yield stamp.record("gap", records=self._gap, reason=self._gap_reason)
        for group in job.groups:
            yield from group_records(
                group,
                stamp,
                update=job.update,
                split="train" if job.kind == "update" else "eval",
                max_text_chars=self._max_text_chars,
                decode=self._decode,
            )
        yield stamp.record(job.kind, **job.fields)

    def _lost(self, records: int, error: Exception) -> None:
        self._gap += records
        self._dropped += records
        self._gap_reason = _reason(error)
        if isinstance(error, OSError):
            assert self._journal is not None
            self._journal.close()  # it may have been removed: look for it again
        with self._wake:
            first, self._failure = not self._failure, self._failure or self._gap_reason
        if first:
            self._report_first(self._gap_reason)

    def _end(self) -> None:
        assert self._journal is not None
        try:
            if self._gap and self._journal.is_open:
                stamp = Stamp(time.time(), self._segment)
                self._journal.append(line(stamp.record("gap", records=self._gap, reason=self._gap_reason)))
            self._journal.sync()
        except OSError:
            pass  # reported with the count of what was dropped
        finally:
            self._journal.close()


def _copy(group: RolloutGroup) -> RolloutGroup:
    """A group that later changes do not reach."""
    members = [
        attrs.evolve(
            member,
            tokens=member.tokens.copy(),
            trained=member.trained.copy(),
            logp=member.logp.copy(),
            advantage=None if member.advantage is None else member.advantage.copy(),
            metrics=dict(member.metrics),
        )
        for member in group.members
    ]
    return attrs.evolve(group, members=members)


def _version() -> str:
    try:
        return metadata.version("retrograd")
    except metadata.PackageNotFoundError:
        return "not installed"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    """A JSON value; what JSON has no form for becomes text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value if not isinstance(value, float) or value - value == 0 else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
