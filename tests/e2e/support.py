"""A folder with a small model, data and run files, and `retrograd` run in it as a user runs it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomlkit

from retrograd.cli import run as run_command_line
from retrograd.metrics import read_metrics

TIMEOUT = 120
"""Seconds after which a process that should have ended is a failure."""

Tables = Mapping[str, Any]


@attrs.frozen
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Lines of stderr from the error message on."""
        lines = self.err.splitlines()
        starts = [n for n, line in enumerate(lines) if line.startswith(("error: ", "Error: "))]
        return lines[starts[-1] :] if starts else []


class Workspace:
    """A user's folder: `model.gguf`, `train.jsonl`, `heldout.jsonl`, and run files that `toml` writes."""

    def __init__(self, directory: Path, model: Path, device: str) -> None:
        self.directory = directory
        self.model = model
        self.device = device
        write_jsonl(self / "train.jsonl", chats(range(24)))
        write_jsonl(self / "heldout.jsonl", chats(range(100, 106)))

    def __truediv__(self, name: str) -> Path:
        return self.directory / name

    def toml(self, name: str = "run.toml", **tables: Any) -> Path:
        """Write a run file: a small SFT run with `tables` laid over it; None leaves a table or key out."""
        base: dict[str, Any] = {
            "run": {"algorithm": "sft"},
            "model": {"path": str(self.model), "device": self.device},
            "output": {"path": "out/adapter.gguf"},
            "lora": {"rank": 4},
            "training": {"ctx": 128, "micro_batch": 64, "lr": 5e-3},
            "sft": {"data": "train.jsonl"},
        }
        path = self / name
        path.write_text(tomlkit.dumps(_merged(base, tables)), encoding="utf-8")
        return path

    @property
    def adapter(self) -> bytes:
        """The bytes of the output of `toml`."""
        return (self / "out" / "adapter.gguf").read_bytes()

    def metrics(self, name: str = "out/adapter.metrics.jsonl") -> list[dict[str, Any]]:
        """Records of the run's `metrics.jsonl`."""
        return list(read_metrics(self / name))

    def losses(self) -> dict[int, float]:
        """Training loss by step."""
        return {r["step"]: r["train/loss"] for r in self.metrics() if "train/loss" in r}

    def held_out(self) -> list[float]:
        """Held-out losses in the order of the evaluations."""
        return [r["eval/loss"] for r in self.metrics() if "eval/loss" in r]

    def states(self, name: str = "checkpoints") -> list[str]:
        """Names of the complete checkpoints, sorted."""
        return sorted(path.name for path in (self / name).glob("*.state"))


def retrograd(*arguments: object, code: int | None = 0, stdin: str | None = None) -> Outcome:
    """Run the command line in this process; a failure shows its output if the exit code is not `code`.

    code None is not checked.
    """
    out, err = io.StringIO(), io.StringIO()
    before = sys.stdin
    try:
        sys.stdin = io.StringIO(stdin or "")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = run_command_line([str(argument) for argument in arguments])
    finally:
        sys.stdin = before
    return _checked(Outcome(found, out.getvalue(), err.getvalue()), arguments, code)


def retrograd_process(
    *arguments: object,
    code: int | None = 0,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Outcome:
    """Run the command line in a process of its own. `before` runs in it first; code None is not checked."""
    process = start_process(*arguments, cwd=cwd, environment=environment, before=before)
    return finish_process(process, arguments, code)


def start_process(
    *arguments: object,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> subprocess.Popen[str]:
    """Start the command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "retrograd", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        preexec_fn=before,
    )


def finish_process(process: subprocess.Popen[str], arguments: Sequence[object], code: int | None) -> Outcome:
    """Wait for the end of a process; one that hangs is killed and fails."""
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"retrograd {arguments} did not end:\n{out}\n{err}") from None
    return _checked(Outcome(process.returncode, out, err), arguments, code)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until `path` exists; fail if the process ends first."""
    deadline = time.monotonic() + TIMEOUT
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{path.name} did not appear:\n{out}\n{err}")
        time.sleep(0.01)


def killed(outcome: Outcome) -> bool:
    """True if the process was ended by SIGKILL."""
    return outcome.code == -signal.SIGKILL


def chats(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Conversations of one turn whose answer can be learnt: as many words as the number's last digit says."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"user number {number}"},
                {"role": "assistant", "content": "the world is yours " * (number % 3 + 1) + "."},
            ]
        }
        for number in numbers
    ]


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write records, one a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def hook_file(path: Path, body: str) -> Path:
    """A local hook file; `body` follows the imports that such files need."""
    head = "import os, signal, threading, time\nfrom pathlib import Path\n"
    path.write_text(f"{head}from retrograd_hookspecs import hookimpl\n\n{body}", encoding="utf-8")
    return path


def _checked(outcome: Outcome, arguments: Sequence[object], code: int | None) -> Outcome:
    shown = f"retrograd {' '.join(map(str, arguments))}\n--- stdout\n{outcome.out}\n--- stderr\n{outcome.err}"
    assert code is None or outcome.code == code, f"exit code {outcome.code}, not {code}: {shown}"
    assert "Traceback" not in outcome.err, shown
    return outcome


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = _merged(merged.get(key, {}), value)
        else:
            merged[key] = value
    return merged
