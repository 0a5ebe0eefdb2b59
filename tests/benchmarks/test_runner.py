"""Processes: what is read from them, and that none stays behind."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from benchmarks.cases import Case
from benchmarks.contestants import Contestant, Options
from benchmarks.runner import Run, Runs, child_environment, measure, parse_figures, run_once

GOOD = '{"rate": 5, "seconds": 1, "peak_mb": 10}'


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def once(code: str, timeout: float = 60.0, environment: dict[str, str] | None = None) -> Run:
    return run_once(python(code), environment or dict(os.environ), round_number=1, timeout=timeout)


def test_last_line_is_the_result() -> None:
    assert parse_figures(f"loading …\n{GOOD}\n\n") == (json.loads(GOOD), "")
    assert "not JSON: 'Segmentation fault'" in parse_figures(f"{GOOD}\nSegmentation fault")[1]
    assert parse_figures("")[1]
    assert parse_figures('{"rate": 5}')[1] == "its result lacks seconds, peak_mb"


def test_environment_of_children() -> None:
    parent = {"PATH": "/bin", "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "1", "OMP_NUM_THREADS": "9"}
    child = child_environment(parent, 3)
    assert child["PATH"] == "/bin"
    assert child["OMP_NUM_THREADS"] == child["NUMBA_NUM_THREADS"] == child["OPENBLAS_NUM_THREADS"] == "3"
    assert not {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} & child.keys()


def test_good_run() -> None:
    run = once(f"print('noise'); print('{GOOD}')")
    assert run.failure == ""
    assert run.figures["rate"] == 5
    assert run.wall_seconds > 0


def test_failure_keeps_status_and_stderr() -> None:
    run = once("import sys; print('boom', file=sys.stderr); sys.exit(3)")
    assert run.failure == "it ended with status 3\nboom\n"


def test_signal_is_named() -> None:
    run = once("import os; os.kill(os.getpid(), 9)")
    assert run.failure.startswith("it ended with signal 9 (SIGKILL)")


def test_program_that_is_not_there() -> None:
    run = run_once(["no-such-program-here"], {}, round_number=1, timeout=5)
    assert "no-such-program-here does not start" in run.failure


def test_timeout_ends_the_process_and_its_children(tmp_path: Path) -> None:
    record = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(record)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    run = once(code, timeout=3.0)
    assert "still running after 3 s" in run.failure
    child = int(record.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child of the timed-out process still runs"
        time.sleep(0.05)


def contestant(name: str, code: str) -> Contestant:
    return Contestant(
        name=name,
        title=name,
        kinds=("sft",),
        problem=lambda _options: "",
        command=lambda _case, _options: python(code),
    )


def test_contestants_take_turns_and_a_failed_one_stops(tmp_path: Path) -> None:
    log = tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write('%s ');"
    contestants = [
        contestant("a", note % "a" + f"print('{GOOD}')"),
        contestant("b", note % "b" + "raise SystemExit(1)"),
        contestant("c", note % "c" + f"print('{GOOD}')"),
    ]
    case = Case(name="x", kind="sft", unit="tok/s", title="")
    lines: list[str] = []
    runs: Runs = {}
    measure(
        [case],
        contestants,
        Options(models={}, cache=tmp_path, threads=1, steps=1, warmup=0),
        rounds=2,
        timeout=60,
        wait_quiet=0,
        report=lines.append,
        runs=runs,
    )
    assert log.read_text().split() == ["a", "b", "c", "a", "c"]
    assert [run.round for run in runs["x", "a"]] == [1, 2]
    assert len(runs["x", "b"]) == 1
    assert any("b: failed: it ended with status 1" in line for line in lines)


def test_failed_preparation_is_the_failure_of_the_case(tmp_path: Path) -> None:
    import attrs

    broken = attrs.evolve(
        contestant("a", "raise SystemExit('never started')"),
        prepare=lambda _case, _options: python("raise SystemExit('cannot convert')"),
    )
    runs: Runs = {}
    measure(
        [Case(name="x", kind="sft", unit="tok/s", title="", model="m")],
        [broken],
        Options(models={}, cache=tmp_path, threads=1, steps=1, warmup=0),
        rounds=2,
        timeout=60,
        wait_quiet=0,
        report=lambda _line: None,
        runs=runs,
    )
    [run] = runs["x", "a"]
    assert "cannot convert" in run.failure


def test_load_is_noted() -> None:
    run = once(f"print('{GOOD}')")
    assert run.load_before == pytest.approx(os.getloadavg()[0], abs=5)
    assert run.others_cores is None or run.others_cores >= 0
