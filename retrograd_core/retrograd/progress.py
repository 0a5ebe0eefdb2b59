"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import IO, Any, Protocol, cast

import attrs

from retrograd_hookspecs import EvaluationReport, StepReport


@attrs.frozen(kw_only=True)
class Pace:
    """Speed of the run so far. `seconds_left` is None while the length is unknown."""

    tokens_per_second: float
    seconds_left: float | None
    memory_bytes: int


class Reporter(Protocol):
    """Receives what happens; never raises."""

    def message(self, text: str) -> None:
        """A line of its own."""

    def status(self, text: str) -> None:
        """What is going on inside a step that takes long; the next one replaces it."""

    def step(self, report: StepReport, pace: Pace) -> None:
        """An optimizer step ended."""

    def evaluated(self, report: EvaluationReport, label: str) -> None:
        """An evaluation ended; `label` says when ("before training", "step 40")."""

    def close(self) -> None:
        """The run ended."""


class SilentReporter:
    """Says nothing: the default of the Python API."""

    def message(self, text: str) -> None:
        pass

    def status(self, text: str) -> None:
        pass

    def step(self, report: StepReport, pace: Pace) -> None:
        pass

    def evaluated(self, report: EvaluationReport, label: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Steadfast:
    """A text stream that takes everything: whoever reads the messages of a run (a terminal, `| head`, a log
    on a full disk) may go away without ending the run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            _abandon(self._stream)
        except (OSError, ValueError):
            pass  # a closed file is a ValueError
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            _abandon(self._stream)
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _abandon(stream: IO[str]) -> None:
    """Let a stream whose reader is gone write to nowhere: what it still holds must not fail at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def _steadfast(stream: IO[str]) -> IO[str]:
    return cast(IO[str], _Steadfast(stream))


class PlainReporter:
    """One line a step, at most one every `interval` seconds; the first and last step always. What goes on
    inside a step is told when nothing was said for `quiet` seconds."""

    def __init__(self, stream: IO[str], interval: float = 2.0, quiet: float = 15.0) -> None:
        self._stream = _steadfast(stream)
        self._interval = interval
        self._quiet = quiet
        self._last = float("-inf")
        self._said = time.monotonic()

    def message(self, text: str) -> None:
        self._said = time.monotonic()
        self._stream.write(text + "\n")
        self._stream.flush()

    def status(self, text: str) -> None:
        if time.monotonic() - self._said >= self._quiet:
            self.message(text)

    def step(self, report: StepReport, pace: Pace) -> None:
        now = time.monotonic()
        if now - self._last >= self._interval or report.step in (1, report.total_steps) or report.skipped:
            self._last = now
            self.message(step_line(report, pace))

    def evaluated(self, report: EvaluationReport, label: str) -> None:
        self.message(evaluation_line(report, label))

    def close(self) -> None:
        self._stream.flush()


class BarReporter:
    """A progress bar with time left, for terminals."""

    def __init__(self, stream: IO[str], title: str = "training") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[line]}"),
            console=Console(file=_steadfast(stream)),
            transient=False,
        )
        self._task: Any = None
        self._title = title

    def message(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def status(self, text: str) -> None:
        self._progress.update(self._started(None), line=text)

    def step(self, report: StepReport, pace: Pace) -> None:
        task = self._started(report.total_steps)
        self._progress.update(
            task, completed=report.step, total=report.total_steps, line=step_line(report, pace)
        )

    def _started(self, total: int | None) -> Any:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(self._title, total=total, line="")
        return self._task

    def evaluated(self, report: EvaluationReport, label: str) -> None:
        self.message(evaluation_line(report, label))

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()


def terminal_reporter(stream: IO[str], title: str = "training") -> Reporter:
    """A bar if the stream is a terminal, else plain lines."""
    return BarReporter(stream, title) if stream.isatty() else PlainReporter(stream)


def step_line(report: StepReport, pace: Pace) -> str:
    """`step 12/400  loss 1.234  310 tok/s  2m 05s left  612 MB`."""
    total = f"/{report.total_steps}" if report.total_steps else ""
    parts = [f"step {report.step}{total}"]
    if "train/epoch" in report.metrics and "train/update" not in report.metrics:
        parts.append(f"epoch {report.metrics['train/epoch']:.2f}")
    if "train/update" in report.metrics:
        parts.append(f"update {report.metrics['train/update']:.0f}")
    if "reward/mean" in report.metrics:
        parts.append(f"reward {report.metrics['reward/mean']:.3f}")
    if "train/loss" in report.metrics:
        parts.append(f"loss {report.metrics['train/loss']:.4f}")
    parts.append(f"{pace.tokens_per_second:,.0f} tok/s")
    if pace.seconds_left is not None:
        parts.append(f"{duration(pace.seconds_left)} left")
    parts.append(size(pace.memory_bytes))
    if report.skipped:
        parts.append("SKIPPED: gradient not finite")
    return "  ".join(parts)


def evaluation_line(report: EvaluationReport, label: str) -> str:
    """`evaluation (step 40): loss 1.234, perplexity 3.43`."""
    return f"evaluation ({label}): {metrics_text(report.metrics)}"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """`loss 1.234, perplexity 3.43` from `eval/loss` and `eval/perplexity`."""
    return ", ".join(f"{name.rsplit('/', 1)[-1]} {value:.4g}" for name, value in metrics.items())


def duration(seconds: float) -> str:
    """`45s`, `2m 05s`, `1h 02m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def size(count: float) -> str:
    """`612 MB`, `1.4 GB` (decimal units)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}" if unit == "GB" else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"
