"""What all sandboxes do with a command and its output."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd_hookspecs import ExecResult

WORK = "/work"
"""The working directory, as the model sees it."""
SCRATCH = "/tmp/.tools"
"""Where tools keep their own files, as the model sees it."""
KILLED = 137
"""Exit code of a command that was killed at its deadline."""
NOT_RUN = 126
MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""What Linux takes as one argument; the whole command may be 16 times as long."""
MAX_WRITE_BYTES = 64 * 1024 * 1024
"""Largest file that is written at once."""

ENVIRONMENT = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "GIT_AUTHOR_NAME": "sandbox",
    "GIT_AUTHOR_EMAIL": "sandbox@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "sandbox",
    "GIT_COMMITTER_EMAIL": "sandbox@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
"""What makes commands give the same output twice. Python takes a byte code file for that of a source with the
same length and second of change, so that an edit within a second would go unseen: none are written."""


class Capture:
    """The first `limit` bytes of a stream, and a count of the others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.dropped = 0

    def add(self, data: bytes | memoryview) -> None:
        room = self._limit - len(self._kept)
        self._kept += data[:room]
        self.dropped += max(len(data) - room, 0)

    def bytes(self) -> bytes:
        """What was kept."""
        return bytes(self._kept)


def plain_arguments(argv: Sequence[str]) -> list[str] | ExecResult:
    """The command as an operating system takes it, or the result of one that no system would run.

    Lone surrogates, which JSON can hold, become question marks. Raises `ValueError` for an empty command.
    """
    if not argv or not argv[0]:
        raise ValueError("the command is empty")
    arguments = [part.encode("utf-8", "replace") for part in argv]
    if any(b"\0" in part for part in arguments):
        return ExecResult(exit_code=NOT_RUN, stdout=b"", stderr=b"an argument holds a null byte\n")
    too_long = any(len(part) > MAX_ARGUMENT_BYTES for part in arguments)
    if too_long or sum(len(part) + 16 for part in arguments) > 16 * MAX_ARGUMENT_BYTES:
        return ExecResult(exit_code=NOT_RUN, stdout=b"", stderr=b"the command is too long\n")
    return [part.decode("utf-8") for part in arguments]
