"""metrics.jsonl through kills, resumes, full disks and bad values; sinks that fail."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from retrograd.metrics import JsonlMetrics, SinkSet, read_metrics


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def written(path: Path, count: int) -> JsonlMetrics:
    sink = JsonlMetrics(path)
    for step in range(1, count + 1):
        sink.write(step, {"train/loss": 1 / step})
    return sink


def test_record_is_one_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    before = time.time()
    written(path, 2).close()
    lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records] == [1, 2]
    assert [r["train/loss"] for r in records] == [1.0, 0.5]
    assert all(before - 1 <= r["time"] <= time.time() + 1 for r in records)


def test_every_record_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlMetrics(path)
    for step in (1, 2, 3):
        sink.write(step, {})
        assert steps(path) == list(range(1, step + 1))


def test_values_that_are_not_finite_are_named_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlMetrics(path)
    sink.write(1, {"a": math.nan, "b": 2.0, "c": -math.inf, "d": math.inf})
    (record,) = read_metrics(path)
    assert (record["a"], record["b"], record["c"], record["d"]) == (None, 2.0, None, None)
    assert record["nonfinite"] == {"a": "nan", "c": "-inf", "d": "inf"}
    assert sink.nonfinite_values == 3
    assert "NaN" not in path.read_text()


def test_field_names_are_reserved(tmp_path: Path) -> None:
    for name in ("step", "time", "nonfinite"):
        with pytest.raises(ValueError, match=name):
            JsonlMetrics(tmp_path / "metrics.jsonl").write(1, {name: 1.0})


@pytest.mark.parametrize("resumed_at", [0, 1, 3, 5, 9])
def test_resume_cuts_exactly_the_later_records(tmp_path: Path, resumed_at: int) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 5).close()
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= resumed_at]
    sink = JsonlMetrics(path)
    sink.resume(resumed_at)
    assert path.read_text().splitlines() == kept
    sink.write(resumed_at + 1, {"x": 1.0})
    assert steps(path) == [*range(1, min(resumed_at, 5) + 1), resumed_at + 1]
    assert not list(tmp_path.glob("metrics.*.jsonl"))


def test_resume_keeps_all_records_of_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = written(path, 3)
    sink.write(3, {"eval/loss": 1.0})
    sink.write(4, {})
    JsonlMetrics(path).resume(3)
    assert steps(path) == [1, 2, 3, 3]


def test_resume_cuts_records_of_its_step_that_came_later(tmp_path: Path) -> None:
    """Updates without a step leave records at the step before them."""
    path = tmp_path / "metrics.jsonl"
    sink = written(path, 3)
    for update in (4.0, 5.0, 6.0):
        sink.write(3, {"train/update": update})
    SinkSet({"metrics.jsonl": JsonlMetrics(path)}, print).resume(3, 4)
    assert steps(path) == [1, 2, 3, 3]
    assert [*read_metrics(path)][-1]["train/update"] == 4.0


@pytest.mark.parametrize("torn", [b'{"step": 4, "time": 1', b'{"step": 4, "ti\n', b"\0\0\0\0"])
def test_torn_last_line_is_cut(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 3).close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert steps(path) == [1, 2, 3]
    sink = JsonlMetrics(path)
    sink.resume(10)
    assert path.read_bytes() == whole
    sink.write(4, {})
    assert steps(path) == [1, 2, 3, 4]


def test_new_run_moves_the_old_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for count in (2, 3, 4):
        written(path, count).close()
    assert steps(path) == [1, 2, 3, 4]
    assert steps(tmp_path / "metrics.1.jsonl") == [1, 2]
    assert steps(tmp_path / "metrics.2.jsonl") == [1, 2, 3]


def test_nothing_happens_before_the_first_write(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 2).close()
    JsonlMetrics(path).close()
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_full_disk_leaves_whole_records_only(tmp_path: Path) -> None:
    """A file-size limit stops the write in the middle of a record, as a full disk does."""
    path = tmp_path / "metrics.jsonl"
    written(path, 3).close()
    size = path.stat().st_size
    sink = JsonlMetrics(path)
    sink.resume(3)
    old_signal = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            sink.write(4, {"train/loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old_signal)
    assert caught.value.errno == errno.EFBIG
    assert path.stat().st_size == size
    sink.write(5, {})
    assert steps(path) == [1, 2, 3, 5]


def test_kill_leaves_a_file_that_resumes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from pathlib import Path; from retrograd.metrics import JsonlMetrics\n"
        "sink = JsonlMetrics(Path(sys.argv[1]))\n"
        "for step in range(1, 10**9): sink.write(step, {'train/loss': 1 / step})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while not path.exists() or path.stat().st_size < 10_000:
        time.sleep(0.01)
    process.kill()
    process.wait()
    found = steps(path)
    assert found == list(range(1, len(found) + 1))
    JsonlMetrics(path).resume(7)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]


class Recorder:
    def __init__(self, fail_in: str = "") -> None:
        self.fail_in = fail_in
        self.calls: list[tuple[str, Any]] = []

    def _call(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        if name == self.fail_in:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("write", step)

    def resume(self, step: int) -> None:
        self._call("resume", step)

    def close(self) -> None:
        self._call("close", None)


def test_sink_set_reaches_every_sink() -> None:
    sinks = {"a": Recorder(), "b": Recorder()}
    warnings: list[str] = []
    together = SinkSet(sinks, warnings.append)
    together.resume(3, 1)
    together.write(4, {})
    together.close()
    together.close()
    for sink in sinks.values():
        assert sink.calls == [("resume", 3), ("write", 4), ("close", None)]
    assert not warnings


@pytest.mark.parametrize("action", ["write", "resume", "close"])
def test_failing_sink_is_switched_off_with_one_warning(action: str) -> None:
    good, bad = Recorder(), Recorder(action)
    warnings: list[str] = []
    together = SinkSet({"bad": bad, "good": good}, warnings.append)
    calls: Mapping[str, Callable[[], None]] = {
        "write": lambda: together.write(1, {}),
        "resume": lambda: together.resume(1, 1),
        "close": together.close,
    }
    calls[action]()
    if action != "close":
        assert together.active == ("good",)
        calls[action]()
        assert len(good.calls) == 2
    assert together.switched_off == ["bad"]
    assert len(warnings) == 1
    assert "'bad' failed" in warnings[0]
    assert "No space left" in warnings[0]
    assert bad.calls[:2] == [(action, bad.calls[0][1]), ("close", None)]


def test_interrupt_is_not_swallowed() -> None:
    class Interrupted(Recorder):
        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SinkSet({"a": Interrupted()}, lambda _: None).write(1, {})
