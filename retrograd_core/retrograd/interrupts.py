"""Ctrl-C and SIGTERM: the first asks the run to finish its step, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import attrs


class StopRequestedError(Exception):
    """Work that a resumed run does again was given up, because the run was asked to stop."""


@attrs.define
class Interrupt:
    """`requested` becomes true with the first signal."""

    requested: bool = False

    def check(self) -> None:
        """Raise `StopRequestedError` if a signal has come: for long work that leaves no trace when given up,
        such as drawing the answers of an update."""
        if self.requested:
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
        interrupt.requested = True
        announce("stopping after this step; once more stops at once and loses it")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
