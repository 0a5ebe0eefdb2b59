"""What every measured process does: time a step, read its own peak memory, print one JSON line.

Standard library only: it is imported by interpreters in which retrograd is not installed.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Peak resident memory of this process in MB (2**20 bytes).

    `reset` starts a new peak where the kernel allows it (Linux), so that what loading a model needed for a
    moment is told apart from what the work needs.
    """

    def __init__(self) -> None:
        self._before = 0.0
        self.was_reset = False

    def reset(self) -> None:
        """Forget the peak so far for `work_mb`; `process_mb` keeps it."""
        self._before = _high_water_mb()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self.was_reset = True

    def work_mb(self) -> float:
        """Peak since `reset`; of the whole process where the kernel cannot reset it."""
        return round(_high_water_mb(), 1)

    def process_mb(self) -> float:
        """Peak of the whole process."""
        return round(max(self._before, _high_water_mb()), 1)


def time_steps(
    step: Callable[[], object], *, warmup: int, steps: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of each of `steps` calls, after `warmup` calls that are not counted."""
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(steps):
        start = clock()
        step()
        seconds.append(clock() - start)
    return seconds


def emit(
    *,
    seconds: Iterable[float],
    work: float,
    memory: PeakMemory,
    versions: Iterable[str],
    **extra: Any,
) -> None:
    """Print the result line. `work` is the amount (tokens, GB, GFLOP) that one sample does.

    `versions` names distributions; `extra` is kept beside the figures as it is.
    """
    samples = list(seconds)
    median = statistics.median(samples)
    line = {
        "seconds": median,
        "rate": work / median,
        "samples": samples,
        "peak_mb": memory.work_mb(),
        "process_peak_mb": memory.process_mb(),
        "versions": {"python": sys.version.split()[0]} | {name: _version(name) for name in versions},
        **extra,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _high_water_mb() -> float:
    # ru_maxrss survives exec on Linux: a child would start at its parent's peak. VmHWM does not.
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
