"""Replies of the judge's model on disk, by a hash of the request; several processes share the file."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from retrograd_hookspecs import RolloutError

_VERSION = 1


class VerdictCache:
    """Looks replies up and stores new ones. What another process appended is seen at the next miss.

    A line that is no record (a process was killed while it wrote) is skipped and counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._replies: dict[str, Any] = {}
        self._read_to = 0
        self.corrupt_lines = 0

    def get(self, key: str) -> Any | None:
        """The reply stored under a key, or None. Raises `RolloutError` if the file cannot be read."""
        if key not in self._replies:
            try:
                self._read_new_lines()
            except OSError as error:
                raise RolloutError(f"the verdict cache {self._path} cannot be read: {error}") from error
        return self._replies.get(key)

    def put(self, key: str, reply: Any) -> None:
        """Store a reply. Raises `RolloutError` if the file cannot be written."""
        line = json.dumps({"v": _VERSION, "key": key, "reply": reply}, ensure_ascii=False)
        try:
            self._append(line.encode("utf-8", "backslashreplace") + b"\n")
        except OSError as error:
            raise RolloutError(f"the verdict cache {self._path} cannot be written: {error}") from error
        self._replies[key] = reply

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a writer was killed: its half a line must not swallow this one
            while line:
                line = line[os.write(descriptor, line) :]
        finally:
            os.close(descriptor)

    def _read_new_lines(self) -> None:
        try:
            with self._path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                size = os.fstat(file.fileno()).st_size
                if size < self._read_to:  # the file was replaced
                    self._read_to = 0
                file.seek(self._read_to)
                new = file.read(size - self._read_to)
        except FileNotFoundError:
            return
        whole, newline, _ = new.rpartition(b"\n")
        self._read_to += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            if line.strip():
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            if record["v"] != _VERSION:
                return  # another version's record is not damage
            key, reply = record["key"], record["reply"]
        except (ValueError, RecursionError, TypeError, KeyError):
            self.corrupt_lines += 1
            return
        if isinstance(key, str):
            self._replies[key] = reply
        else:
            self.corrupt_lines += 1
