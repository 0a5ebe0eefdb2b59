"""Ctrl-C and SIGTERM: the first asks the run to finish its step, the second stops at once.

Work that a resumed run does again does not hold the first one up: it looks whether it came (`check`), or lets
it end whatever it waits for (`given_up_at_once`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import attrs


class StopRequestedError(BaseException):
    """Work that a resumed run does again was given up, because the run was asked to stop.

    No `Exception`: it may come up within a user's code, which must not take it for a fault of an answer.
    """


@attrs.define
class Interrupt:
    """`requested` becomes true with the first signal."""

    requested: bool = False
    _at_once: bool = False

    def check(self) -> None:
        """Raise `StopRequestedError` if a signal has come: for long work that leaves no trace when given up,
        such as drawing the answers of an update."""
        if self.requested:
            raise StopRequestedError

    @contextmanager
    def given_up_at_once(self) -> Iterator[None]:
        """A first signal ends the block with `StopRequestedError`, whatever it waits for: a reward program
        may hang. What comes of a block that caught the error itself does not count either."""
        self._at_once = True
        try:
            self.check()
            yield
            self.check()
        finally:
            self._at_once = False

    def signalled(self) -> None:
        """A first signal came, in the main thread."""
        self.requested = True
        if self._at_once:
            raise StopRequestedError


@contextmanager
def catch_interrupts(interrupt: Interrupt, announce: Callable[[str], None]) -> Iterator[Interrupt]:
    """Handle SIGINT and SIGTERM while the block runs (main thread only; elsewhere a no-op)."""
    interrupt.requested = False
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        announce("stopping after this step; once more stops at once and loses it")
        interrupt.signalled()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
