"""Time and memory of a few training steps, by phase and by kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import attrs
import psutil

from retrograd_hookspecs import Algorithm, KernelImpl, KernelTable

from .assembly import Assembly, assemble
from .config import Document
from .memory_report import memory_report
from .observe import NullObserver
from .progress import Reporter, size
from .session import KERNELS_MESSAGE, slow_message, warm_up
from .update import Updater

WITHIN_A_STEP = frozenset({"timing/gradient_seconds", "timing/training_seconds", "timing/update_seconds"})
"""Phases that `timing/step_seconds` holds already."""


@attrs.define
class KernelTime:
    """What the calls of one op took."""

    op: str
    format: str
    variant: str
    seconds: float = 0.0
    calls: int = 0


class TimedKernels:
    """A kernel table that measures every call."""

    def __init__(self, table: KernelTable) -> None:
        self._table = table
        self.times: dict[tuple[str, str], KernelTime] = {}

    def get(self, op: str, format: str = "") -> Callable[..., Any]:
        """The function of the table beneath, with a clock around it."""
        function = self._table.get(op, format)
        serving = self._table.serving(op, format)
        entry = self.times.setdefault((op, format), KernelTime(op=op, format=format, variant=serving.variant))

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                entry.seconds += time.perf_counter() - started
                entry.calls += 1

        return timed

    def serving(self, op: str, format: str = "") -> KernelImpl:
        """The implementation of the table beneath."""
        return self._table.serving(op, format)

    def clear(self) -> None:
        """Forget all times."""
        for entry in self.times.values():
            entry.seconds, entry.calls = 0.0, 0


def profile_run(document: Document, reporter: Reporter, *, steps: int) -> list[str]:
    """Lines of a report. The first step is not counted; nothing is written."""
    assembly = assemble(document)
    services = assembly.services
    services.provide("observer", NullObserver())
    kernels = TimedKernels(services.get("kernels"))
    services.provide("kernels", kernels)
    with slow_message(reporter, KERNELS_MESSAGE):
        warm_up(services.get("engine"))
    algorithm = services.get("algorithm")
    with closing(algorithm):
        return _profile(assembly, algorithm, kernels, reporter, steps)


def _profile(
    assembly: Assembly, algorithm: Algorithm, kernels: TimedKernels, reporter: Reporter, steps: int
) -> list[str]:
    services = assembly.services
    algorithm.prepare()
    services.provide("total_steps", algorithm.total_steps())
    update = Updater(
        trainable=services.get("trainable"),
        optimizer=services.get("optimizer"),
        schedule=services.get("schedule"),
        kernels=kernels,
        max_grad_norm=assembly.config.training.max_grad_norm,
    )
    process = psutil.Process()
    phases: dict[str, float] = {}
    counted = tokens = 0
    peak = 0
    for number, report in enumerate(algorithm.run(update)):
        reporter.message(f"step {report.step}: {report.metrics.get('timing/step_seconds', 0.0):.2f} s")
        if number == 0:
            kernels.clear()
            continue
        counted += 1
        tokens += report.tokens
        peak = max(peak, process.memory_info().rss)
        for name, value in report.metrics.items():
            if name.startswith("timing/"):
                phases[name] = phases.get(name, 0.0) + value
        if counted == steps:
            break
    total = sum(seconds for name, seconds in phases.items() if name not in WITHIN_A_STEP)
    lines = [
        f"{counted} steps, {tokens} tokens, {total:.2f} s: {tokens / max(total, 1e-9):,.0f} tokens/s",
        "",
    ]
    lines += [f"{name:<28} {value:9.3f} s {value / max(total, 1e-9):7.1%}" for name, value in phases.items()]
    lines += ["", f"{'kernel':<28} {'variant':<12} {'calls':>7} {'seconds':>9}   share"]
    ordered = sorted(kernels.times.values(), key=lambda entry: -entry.seconds)
    in_kernels = 0.0
    for entry in ordered:
        if entry.calls:
            in_kernels += entry.seconds
            name = f"{entry.op} {entry.format}".strip()
            share = entry.seconds / max(total, 1e-9)
            lines.append(
                f"{name:<28} {entry.variant:<12} {entry.calls:>7} {entry.seconds:>9.3f} {share:7.1%}"
            )
    rest = total - in_kernels
    lines.append(f"{'outside kernels':<49} {rest:>9.3f} {rest / max(total, 1e-9):7.1%}")
    lines += ["", f"resident memory {size(peak)}; estimated:"]
    lines += [f"  {name:<28} {size(count):>10}" for name, count in memory_report(assembly).parts]
    return lines
