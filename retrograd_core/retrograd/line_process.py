"""A child process that is spoken to in lines, under a deadline, and of which nothing is left behind.

The process leads its own process group. What it writes to stderr is passed on line by line, and the end of
it is kept for error messages. Reading and writing take turns in one loop, so neither side can wait for the
other for ever: a program may answer while it is still being written to, or answer nothing at all.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

MAX_LINE_BYTES = 8 * 1024 * 1024
"""Longest line in either direction, without its newline."""
TICK_SECONDS = 0.02
"""How often a silent process is looked at: a dead one may have left its pipes to a child of its own."""
EXIT_SECONDS = 1.0
"""How long to wait for the exit status of a process that has closed a pipe."""
_CHUNK_BYTES = 1 << 18
_STDERR_LINES = 20
_STDERR_LINE_BYTES = 1 << 14
_SHOWN_CHARACTERS = 300


class FaultError(Exception):
    """What a program did wrong. `line` is what it wrote, None where that does not matter.

    `answer` is the index of the answer that the fault concerns, None for the next one without a reply.
    """

    def __init__(self, what: str, line: bytes | None = None, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.line = line
        self.hint = hint
        self.answer: int | None = None


class LateError(FaultError):
    """The deadline has passed."""


class EndedError(FaultError):
    """The process ended. `status` is its exit status, negative for a signal."""

    def __init__(self, status: int, line: bytes | None = None) -> None:
        super().__init__(_status_text(status), line, _status_hint(status))
        self.status = status


class LineProcess:
    """Starts a program and exchanges lines with it. Used by one thread, `end` apart.

    `show` receives each line of its stderr. Raises OSError where the program cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, executable: str, directory: Path, show: Callable[[str], None]
    ) -> None:
        self._process = subprocess.Popen(
            list(command),
            executable=executable,
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        # Also runs when the object is forgotten and when the interpreter exits.
        self._kill = weakref.finalize(self, _end_group, self._process, os.getpid())
        self._stdin, self._stdout, self._stderr = _pipes(self._process)
        self._selector = selectors.DefaultSelector()
        self._lines = _LineBuffer()
        self._log = _StderrLog(show)
        self._pending = memoryview(b"")
        self._ends_input = False
        self._refused_input = False
        self._open = {self._stdout, self._stderr}
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        for pipe in (self._stdout, self._stderr):
            self._selector.register(pipe, selectors.EVENT_READ)

    @property
    def unsent(self) -> int:
        """Bytes that the program has not taken yet."""
        return len(self._pending)

    def lines(self, payload: bytes, deadline: float, *, last: bool = False) -> Iterator[bytes]:
        """Write `payload` and yield the lines that come, without end.

        `last` closes stdin behind the payload. `deadline` is a time of `time.monotonic`.

        Raises:
            EndedError: the process has ended, and every whole line that it wrote has been yielded.
            LateError: the deadline has passed.
            FaultError: a line is too long, or a pipe was closed.
        """
        self._pending = memoryview(payload)
        self._ends_input = last
        if not self._stdin.closed:
            self._selector.register(self._stdin, selectors.EVENT_WRITE)
        while True:
            if (line := self._lines.pop()) is not None:
                yield line
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise LateError("did not answer in time", self._lines.rest() or None)
            if self._stdout not in self._open or self._refused_input:
                yield from self._ending(min(EXIT_SECONDS, left), last)
            elif not self._pump(min(TICK_SECONDS, left)) and self._process.poll() is not None:
                yield from self._ending(0.0, last)

    def unread(self) -> bytes:
        """What the program has written beyond the lines taken so far: the first line, or a part of one."""
        if self._open:
            self._pump(0.0)
        return self._lines.pop() or self._lines.rest()

    def close(self, grace_seconds: float) -> None:
        """Close stdin, wait for the program to end, and kill its process group. May be called again."""
        self._close_stdin()
        deadline = time.monotonic() + grace_seconds
        while self._kill.alive and self._process.poll() is None and time.monotonic() < deadline:
            self._pump(TICK_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the process group, read what is left in the pipes, and close them. May be called again."""
        self._kill()
        self._close_stdin()
        self._drain()
        self._selector.close()
        for pipe in (self._stdout, self._stderr):
            pipe.close()
        self._open.clear()
        self._log.flush()

    def end(self) -> None:
        """Kill the process group, from any thread: one that is reading lines sees the process end."""
        self._kill()

    def stderr_text(self) -> str:
        """The last lines of stderr under a heading that counts them; "" if there are none."""
        return self._log.text()

    def _ending(self, seconds: float, last: bool) -> Iterator[bytes]:
        """Yield the lines that are left and raise with the reason why there are no more."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            self._pump(TICK_SECONDS)
        status = self._process.poll()
        if status is not None:
            self._kill()  # its children hold the pipes
        self._drain()
        while (line := self._lines.pop()) is not None:
            yield line
        rest = self._lines.rest()
        if status is None:
            raise FaultError(
                f"closed its standard {'input' if self._refused_input else 'output'}", rest or None
            )
        if status == 0 and self._refused_input:
            raise FaultError("ended before it had read everything", rest or None)
        if rest and last and status == 0:
            yield rest  # a last line without a newline
            rest = b""
        raise EndedError(status, rest or None)

    def _pump(self, seconds: float) -> bool:
        """Wait at most `seconds` for a pipe to become ready, then read and write once. False if none did."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.fileobj is self._stdin:
                self._write()
            else:
                self._read(self._stdout if key.fileobj is self._stdout else self._stderr)
        return bool(ready)

    def _write(self) -> None:
        try:
            sent = os.write(self._stdin.fileno(), self._pending[:_CHUNK_BYTES])
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._refused_input = True
            self._close_stdin()
            return
        self._pending = self._pending[sent:]
        if not self._pending:
            self._selector.unregister(self._stdin)
            if self._ends_input:
                self._close_stdin()

    def _read(self, pipe: IO[bytes]) -> bool:
        """Read once. False if there was nothing."""
        try:
            data = os.read(pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
            self._open.discard(pipe)
            return False
        (self._lines if pipe is self._stdout else self._log).add(data)
        return True

    def _drain(self) -> None:
        """Read what is in the pipes now; a process that left the group may go on filling them."""
        deadline = time.monotonic() + EXIT_SECONDS
        for pipe in (self._stdout, self._stderr):
            while pipe in self._open and time.monotonic() < deadline and self._read(pipe):
                pass

    def _close_stdin(self) -> None:
        if not self._stdin.closed:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._stdin)
            self._stdin.close()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdin, process.stdout, process.stderr


def _end_group(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill the process group and reap its leader. Runs once: later the group's number may be another's."""
    if os.getpid() != owner:  # a fork of this process is not the parent
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_SECONDS)


class _LineBuffer:
    """Bytes in, lines out."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._searched = 0

    def add(self, data: bytes) -> None:
        self._bytes += data

    def pop(self) -> bytes | None:
        """The next line without its newline, None if there is no whole one. Raises `FaultError`."""
        end = self._bytes.find(b"\n", self._searched)
        self._searched = len(self._bytes)
        if (end if end >= 0 else len(self._bytes)) > MAX_LINE_BYTES:
            raise FaultError(f"wrote a line longer than {MAX_LINE_BYTES:,} bytes (8 MiB)", self.rest())
        if end < 0:
            return None
        line = bytes(self._bytes[:end])
        del self._bytes[: end + 1]
        self._searched = 0
        return line

    def rest(self) -> bytes:
        """What is there after the last whole line."""
        return bytes(self._bytes)


class _StderrLog:
    """Passes lines of stderr on and keeps the last ones."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._rest = bytearray()
        self._last: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._count = 0

    def add(self, data: bytes) -> None:
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        for line in lines:
            self._line(line)
        # A line without end is passed on in parts.
        while len(rest) > _STDERR_LINE_BYTES:
            self._line(rest[:_STDERR_LINE_BYTES])
            rest = rest[_STDERR_LINE_BYTES:]
        self._rest = rest

    def flush(self) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = bytearray()

    def text(self) -> str:
        if not self._last:
            return ""
        shown = len(self._last)
        count = f"the last {shown} of {self._count:,} lines" if shown < self._count else "all"
        lines = "".join(f"\n    {shorten(line)}" for line in self._last)
        return f"its stderr ({count}):{lines}"

    def _line(self, line: bytearray) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self._count += 1
        self._last.append(text)
        self._show(text)


def shorten(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """The text, or its beginning with the number of characters that are left out."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def _status_text(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


def _status_hint(status: int) -> str:
    return "the system kills a process so when memory runs out" if status == -signal.SIGKILL else ""
