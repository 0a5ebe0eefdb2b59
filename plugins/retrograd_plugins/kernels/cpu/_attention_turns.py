"""In which order threads add to the gradients of the same keys.

Tasks of a key/value head are numbered and handed out in that order. A task adds what it found for a block of
keys once all tasks before it that add to the same rows have done so: every sum has one order, whatever the
threads do. A task waits only for tasks before it, which threads are working on: none waits for ever.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ._attention_blocks import KEY_BLOCK
from ._math_common import SERIAL
from ._simd_memory import address
from ._stack_memory import add_shared, pause, read_shared

FINISHED = 1 << 40
"""Progress of a task that adds nothing any more; else the position up to which it has added."""


@njit(**SERIAL)
def _part(segment: Any, own: Any) -> Any:
    """Rows [first, stop) of a segment's context or of its own keys, and row − position in them."""
    if own:
        return segment[4], segment[4] + segment[1], segment[4] - segment[3]
    return segment[2], segment[2] + segment[3], segment[2]


@njit(**SERIAL)
def needed_progress(before: Any, segment: Any, stop: Any) -> Any:
    """What progress of a task in segment `before` a task in `segment` needs to add positions below `stop`.

    Rows that both see at the same positions are added by both in the order of positions.
    """
    needed = 0
    for one in range(2):
        first, end, shift = _part(before, one)
        for other in range(2):
            my_first, my_end, my_shift = _part(segment, other)
            if max(first, my_first) < min(end, my_end):
                needed = max(needed, stop if shift == my_shift else FINISHED)
    return needed


@njit(**SERIAL)
def wait_for_turn(progress: Any, segments: Any, blocks: Any, first: Any, task: Any, block: Any) -> Any:
    """Wait until `task` may add the block at position `block`; returns the first task that has not finished.

    `blocks` are the tasks as rows (segment, first query); those before `first` have finished.
    """
    while first < task and read_shared(address(progress, first)) == FINISHED:
        first += 1
    for before in range(first, task):
        needed = needed_progress(segments[blocks[before, 0]], segments[blocks[task, 0]], block + KEY_BLOCK)
        while read_shared(address(progress, before)) < needed:
            pause()
    return first


@njit(**SERIAL)
def report_progress(progress: Any, task: Any, value: Any) -> None:
    """Let the tasks behind `task` add what lies before position `value`."""
    place = address(progress, task)
    add_shared(place, value - read_shared(place))
