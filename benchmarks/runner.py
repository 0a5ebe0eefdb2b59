"""Run contestants in turn, a fresh process each, so that drift of the machine hits all alike."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import psutil

from .cases import Case
from .contestants import Contestant, Options

ROOT = Path(__file__).resolve().parents[1]
STDERR_TAIL = 2000
QUIET_CORES = 0.25

# A forced OpenBLAS core type or cache size slows NumPy down (or wrongly speeds it up): everyone is measured
# with what the libraries choose for this processor.
DROPPED_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


@attrs.frozen(kw_only=True)
class Run:
    """One measured process: `figures` is the JSON it printed, or `failure` says why there is none."""

    round: int
    figures: Mapping[str, Any] = attrs.field(factory=dict)
    failure: str = ""
    wall_seconds: float = 0.0
    load_before: float = 0.0
    """Load average of the last minute when it started."""
    others_cores: float | None = None
    """Processor cores that other processes used meanwhile, on average; None where it cannot be told."""


Runs = dict[tuple[str, str], list[Run]]
"""By (case, contestant), a run a round."""


def measure(
    cases: Sequence[Case],
    contestants: Sequence[Contestant],
    options: Options,
    *,
    rounds: int,
    timeout: float,
    wait_quiet: float,
    report: Callable[[str], None],
    runs: Runs,
) -> None:
    """Every case with every contestant that takes it, `rounds` times: A B C, A B C, …

    Adds to `runs`, so that the caller has what was measured when it is interrupted. A contestant that failed
    a case is not run on it again; its failure is kept.
    """
    environment = child_environment(os.environ, options.threads)
    for case, contestant in _pairs(cases, contestants):
        command = contestant.prepare(case, options)
        if command is None:
            continue
        report(f"preparing {case.model} for {contestant.name}")
        prepared = run_once(command, environment, round_number=0, timeout=timeout, needs_figures=False)
        if prepared.failure:
            runs[case.name, contestant.name] = [prepared]
    for number in range(1, rounds + 1):
        # Round by round within a case, and case by case within a round: contestants of one case run close
        # together in time, and each case is spread over the whole session.
        for case, contestant in _pairs(cases, contestants):
            done = runs.setdefault((case.name, contestant.name), [])
            if done and done[-1].failure:
                continue
            wait_until_quiet(wait_quiet)
            run = run_once(
                contestant.command(case, options), environment, round_number=number, timeout=timeout
            )
            done.append(run)
            report(f"round {number}/{rounds}  {case.name}  {contestant.name}: {describe(run, case)}")


def describe(run: Run, case: Case) -> str:
    """One line of progress."""
    if run.failure:
        return "failed: " + run.failure.strip().splitlines()[0]
    busy = "" if run.others_cores is None else f", others used {run.others_cores:.1f} cores"
    return f"{run.figures['rate']:.4g} {case.unit}, {run.figures['peak_mb']:.0f} MB{busy}"


def child_environment(parent: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of every measured process: same threads for all, no network, no forced BLAS type."""
    environment = {name: value for name, value in parent.items() if name not in DROPPED_VARIABLES}
    environment |= {name: str(threads) for name in THREAD_VARIABLES}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    return environment


def run_once(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    round_number: int,
    timeout: float,
    needs_figures: bool = True,
) -> Run:
    """Start `command` in the checkout's root, wait for it, and read its last line as JSON."""
    load = os.getloadavg()[0]
    busy_before, started = busy_seconds(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        try:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, env=environment, cwd=ROOT, start_new_session=True
            )
        except OSError as error:
            return Run(round=round_number, failure=f"{command[0]} does not start: {error}", load_before=load)
        with _ended(process):
            failure, own_seconds = _wait(process, timeout)
        wall = time.perf_counter() - started
        others = None
        if (busy_after := busy_seconds()) is not None and busy_before is not None:
            others = round(max(0.0, busy_after - busy_before - own_seconds) / wall, 2)
        stdout.seek(0)
        stderr.seek(0)
        figures, problem = parse_figures(stdout.read()) if needs_figures else ({}, "")
        if failure or problem:
            failure = f"{failure or problem}\n{stderr.read()[-STDERR_TAIL:]}"
    return Run(
        round=round_number,
        figures={} if failure else figures,
        failure=failure,
        wall_seconds=round(wall, 2),
        load_before=round(load, 2),
        others_cores=others,
    )


def parse_figures(output: str) -> tuple[dict[str, Any], str]:
    """The figures in the last line of a process's output, or what is wrong with it."""
    line = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    try:
        figures = json.loads(line)
    except json.JSONDecodeError:
        return {}, f"its last line is not JSON: {line[:200]!r}"
    missing = [key for key in ("rate", "seconds", "peak_mb") if key not in figures]
    return (figures, "") if not missing else ({}, f"its result lacks {', '.join(missing)}")


def busy_seconds() -> float | None:
    """Processor seconds that all processes of this machine have used; None where it cannot be told."""
    times = psutil.cpu_times()
    parts = [getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")]
    total = float(sum(parts))
    return total if total > 0 else None


def wait_until_quiet(limit: float, *, window: float = 1.0) -> None:
    """Wait, at most `limit` seconds, until others use less than a quarter of a core."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        before = busy_seconds()
        time.sleep(window)
        after = busy_seconds()
        if before is None or after is None or (after - before) / window < QUIET_CORES:
            return


def _pairs(cases: Sequence[Case], contestants: Sequence[Contestant]) -> Iterator[tuple[Case, Contestant]]:
    for case in cases:
        for contestant in contestants:
            if contestant.runs(case):
                yield case, contestant


def _wait(process: subprocess.Popen[Any], timeout: float) -> tuple[str, float]:
    """Why the process failed, or "", and the processor seconds it and its children used."""
    deadline = time.monotonic() + timeout
    pause = 0.01
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            return f"it was still running after {timeout:.0f} s", 0.0
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    ending = f"status {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
    return ("" if code == 0 else f"it ended with {ending}"), usage.ru_utime + usage.ru_stime


@contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Leave nothing running: not on a timeout, not on Ctrl-C, no helper of the process either."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.returncode is None:
            process.wait()
