"""What a person sees of a run, and that a run does not depend on anybody seeing it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.progress import BarReporter, Pace, PlainReporter, Reporter, duration, size
from retrograd_hookspecs import EvaluationReport, StepReport

STEP = StepReport(step=2, total_steps=4, metrics={"train/loss": 1.25, "train/epoch": 0.5}, tokens=8)
PACE = Pace(tokens_per_second=1234.0, seconds_left=125.0, memory_bytes=612_000_000)
EVALUATION = EvaluationReport(metrics={"eval/loss": 1.5}, score=1.5, higher_is_better=False)


class Gone(io.StringIO):
    """A stream that refuses everything."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error

    def flush(self) -> None:
        raise self._error


def report_everything(reporter: Reporter) -> None:
    reporter.message("hello")
    reporter.step(STEP, PACE)
    reporter.evaluated(EVALUATION, "step 2")
    reporter.close()


def test_plain_lines() -> None:
    stream = io.StringIO()
    report_everything(PlainReporter(stream))
    assert stream.getvalue().splitlines() == [
        "hello",
        "step 2/4  epoch 0.50  loss 1.2500  1,234 tok/s  2m 05s left  612 MB",
        "evaluation (step 2): loss 1.5",
    ]


@pytest.mark.parametrize("kind", [PlainReporter, BarReporter])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "gone"), OSError(28, "full"), OSError(5, "hung up"), ValueError("closed")]
)
def test_a_reporter_never_raises(kind: type[PlainReporter | BarReporter], error: Exception) -> None:
    report_everything(kind(Gone(error)))


def test_a_command_outlives_the_reader_of_its_messages(tmp_path: Path) -> None:
    """As in `retrograd train run.toml 2>&1 >log | head -1`: it runs to its end and exits with 0."""
    done = tmp_path / "done"
    code = (
        "import pathlib, sys\n"
        "from retrograd.progress import PlainReporter\n"
        "reporter = PlainReporter(sys.stderr)\n"
        "for n in range(5000): reporter.message(f'line {n} ' + 'x' * 100)\n"
        f"pathlib.Path({str(done)!r}).touch()\n"
    )
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run([sys.executable, "-c", code], stderr=write, check=False)
    finally:
        os.close(write)
    assert done.exists()
    assert result.returncode == 0


def test_durations_and_sizes() -> None:
    assert [duration(s) for s in (0.4, 59.6, 125, 3725)] == ["0s", "1m 00s", "2m 05s", "1h 02m"]
    assert [size(n) for n in (12, 1500, 612e6, 1.44e9)] == ["12 B", "2 kB", "612 MB", "1.4 GB"]
