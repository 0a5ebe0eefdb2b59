"""The append-only file of records."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import attrs

from .records import VERSION

FILE = "observe.jsonl"
_RUN = f'{{"v":{VERSION},"kind":"run",'.encode()


@attrs.frozen(kw_only=True)
class Opening:
    """What was found in the file, and what this process is in it.

    `torn_bytes` is the length of a last line that a kill cut and that was taken off. `other` is the
    directory that another process records into, if that is why this one is in a directory below it.
    """

    run_id: str
    segment: int
    torn_bytes: int
    other: Path | None = None


class Journal:
    """`observe.jsonl` of one run in a directory.

    A process holds a lock on the file while it records. A second run that is given the directory meanwhile
    records into `DIRECTORY/run-ID`. A resumed run goes on under its id in the file whose last run has the
    same `output`.
    """

    def __init__(self, directory: Path, *, output: str, resumed: bool) -> None:
        self.directory = directory
        self._root = directory
        self._output = output
        self._resumed = resumed
        self._descriptor: int | None = None
        self._opening: Opening | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.directory / FILE

    @property
    def is_open(self) -> bool:
        """True between `open` and `close`."""
        return self._descriptor is not None

    @property
    def opening(self) -> Opening:
        """What the first `open` found."""
        assert self._opening is not None, "open comes first"
        return self._opening

    def open(self) -> None:
        """Create or open the file and repair its end. Raises `OSError`.

        Opened again after a failure, the run keeps its id and segment.
        """
        if self._opening is not None:
            # The parent is not made again: it may be where a disk was mounted.
            self.directory.mkdir(exist_ok=True)
            if not self._take():
                raise BlockingIOError(errno.EWOULDBLOCK, "another run records here", str(self.path))
            self._repair()
            return
        new_id = uuid4().hex[:8]
        self.directory = self._home() if self._resumed else self._root
        self.directory.mkdir(parents=True, exist_ok=True)
        other = None
        if not self._take():
            other, self.directory = self.directory, self._root / f"run-{new_id}"
            self.directory.mkdir(exist_ok=True)
            self._take()
        torn_bytes = self._repair()
        last = _last_run(self.path)
        same = self._resumed and last.get("output") == self._output
        self._opening = Opening(
            run_id=str(last["run"]) if same else new_id,
            segment=int(last.get("segment", 0)) + 1,
            torn_bytes=torn_bytes,
            other=other,
        )

    def is_empty(self) -> bool:
        """True if nothing is in the file. Raises `OSError`."""
        assert self._descriptor is not None
        return os.fstat(self._descriptor).st_size == 0

    def append(self, lines: bytes) -> None:
        """Write whole lines, or nothing. Raises `OSError`, also if the file is no longer in its place."""
        descriptor = self._descriptor
        assert descriptor is not None, "open comes first"
        before = os.fstat(descriptor)
        if not os.path.samestat(before, self.path.stat()):
            raise FileNotFoundError(errno.ENOENT, "the file was replaced", str(self.path))
        data = memoryview(lines)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            # If this fails too, `open` repairs the end.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before.st_size)
            raise

    def close(self) -> None:
        """Release the file and its lock; may be called more than once."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def sync(self) -> None:
        """Wait until the file is on the disk. Raises `OSError`."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def _home(self) -> Path:
        """The directory that the run which is resumed was recorded in."""
        for directory in (self._root, *sorted(self._root.glob("run-*"))):
            if _last_run(directory / FILE).get("output") == self._output:
                return directory
        return self._root

    def _take(self) -> bool:
        """Open the file and lock it; False if another process holds it."""
        self.close()
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            pass  # a file system without locks
        self._descriptor = descriptor
        return True

    def _repair(self) -> int:
        """Cut a last line that has no end; how many bytes were cut."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        keep = size
        while keep:
            start = max(0, keep - 65536)
            newline = os.pread(self._descriptor, keep - start, start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < size:
            os.ftruncate(self._descriptor, keep)
        return size - keep


def is_recording(path: Path) -> bool:
    """True while a process records into the file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # it is not there, or its file system has no locks
    return False


def _last_run(path: Path) -> dict[str, Any]:
    """The last `run` record of a file; empty if there is none."""
    last = b""
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.startswith(_RUN):
                    last = line
    try:
        record = json.loads(last)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
