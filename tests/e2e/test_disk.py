"""A disk that is full, or becomes so: nothing half-written stays, checkpoints do, the run can go on."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import Workspace, hook_file, retrograd, retrograd_process

LIMIT = """
import resource

@hookimpl
def retrograd_step_finished(run, report):
    if report.step == {step}:
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


def limit_file_size(size: int) -> Callable[[], None]:
    """No file of a process may grow over `size` bytes: writes fail as on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def leftovers(workspace: Workspace) -> list[str]:
    """Temporary files that should be gone."""
    names = [p.name for p in workspace.directory.rglob("*")]
    return [n for n in names if n.endswith((".tmp", ".part", ".old", ".probe")) or n.startswith(".")]


@pytest.fixture
def whole(workspace: Workspace) -> bytes:
    """The adapter of an undisturbed run of `tables`."""
    retrograd("train", workspace.toml(**tables()))
    for name in ("out", "checkpoints"):
        (workspace / name).rename(workspace / f"{name}.whole")
    return (workspace / "out.whole" / "adapter.gguf").read_bytes()


def tables(**more: Any) -> dict[str, Any]:
    """A run with a checkpoint after every third step."""
    return {"checkpoint": {"directory": "checkpoints", "mode": "steps", "every_steps": 3}, **more}


def test_no_space_for_a_checkpoint(workspace: Workspace, whole: bytes) -> None:
    hook_file(workspace / "full.py", LIMIT.format(step=5, size=20_000))
    path = workspace.toml(**tables(plugins={"load": ["full.py"]}))
    found = retrograd_process("train", path, code=1)
    message = "\n".join(found.errors)
    assert f"{workspace / 'checkpoints' / 'step-000006.state'}: the checkpoint cannot be written" in message
    assert "File too large" in message
    assert "earlier checkpoints are intact" in message
    assert "MiB are free" in message
    assert workspace.states() == ["step-000003.state"]
    assert not leftovers(workspace)
    retrograd("train", workspace.toml(**tables()), "--resume")
    assert workspace.adapter == whole


def test_no_space_for_the_output(workspace: Workspace, whole: bytes) -> None:
    """The last checkpoint was written, so only the output is missing; `--resume` writes it."""
    last = max(r["step"] for r in workspace.metrics("out.whole/adapter.metrics.jsonl"))
    hook_file(workspace / "full.py", LIMIT.format(step=last, size=16_000))
    path = workspace.toml(**tables(plugins={"load": ["full.py"]}))
    found = retrograd_process("train", path, code=1)
    message = "\n".join(found.errors)
    assert str(workspace / "out" / "adapter.gguf") in message
    assert "File too large" in message
    assert not (workspace / "out" / "adapter.gguf").exists()
    assert not leftovers(workspace)
    retrograd("train", workspace.toml(**tables()), "--resume")
    assert workspace.adapter == whole


def test_output_that_cannot_be_written_in_the_end_loses_nothing(workspace: Workspace, whole: bytes) -> None:
    hook_file(
        workspace / "spoil.py",
        "@hookimpl\ndef retrograd_step_finished(run, report):\n"
        "    if report.step == report.total_steps:\n"
        "        run.output.mkdir()\n",
    )
    found = retrograd("train", workspace.toml(**tables(plugins={"load": ["spoil.py"]})), code=1)
    assert str(workspace / "out" / "adapter.gguf") in "\n".join(found.errors)
    # Step 17 is no third one: the state was saved because the run failed.
    assert "go on from step 17 with --resume" in found.err
    (workspace / "out" / "adapter.gguf").rmdir()
    retrograd("train", workspace.toml(**tables()), "--resume")
    assert workspace.adapter == whole


def test_no_space_for_metrics_costs_metrics_only(workspace: Workspace, whole: bytes) -> None:
    hook_file(workspace / "full.py", LIMIT.format(step=1, size=6_000))
    path = workspace.toml(lora={"rank": 1, "targets": ["q"]}, plugins={"load": ["full.py"]})
    found = retrograd_process("train", path)
    assert "metrics sink 'metrics.jsonl' failed in write (OSError: " in found.err
    assert found.err.count("metrics sink") == 1
    assert (workspace / "out" / "adapter.gguf").exists()
    text = (workspace / "out" / "adapter.metrics.jsonl").read_text()
    assert text.endswith("\n")
    assert 1 < len(workspace.metrics()) < 17
    assert len(text.splitlines()) == len(workspace.metrics())


def test_no_space_from_the_start(workspace: Workspace) -> None:
    found = retrograd_process("train", workspace.toml(), code=2, before=limit_file_size(100))
    assert "adapter.resolved.toml" in "\n".join(found.errors)
    assert not (workspace / "out" / "adapter.gguf").exists()


@pytest.fixture
def small_disk(workspace: Workspace) -> Iterator[Path]:
    """A file system of 384 kB at `checkpoints`."""
    directory = workspace / "checkpoints"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=384k", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode and os.environ.get("CI"):
        pytest.fail(f"CI must be able to mount a small file system: {done.stderr.strip()}")
    if done.returncode:
        pytest.skip(f"a file system of its own needs root ({done.stderr.strip()}); see the tests above")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_disk_that_fills_up(workspace: Workspace, whole: bytes, small_disk: Path) -> None:
    found = retrograd("train", workspace.toml(**tables()), code=1)
    message = "\n".join(found.errors)
    assert "the checkpoint cannot be written" in message
    assert "No space left on device" in message or "are free there" in message
    states = workspace.states()
    assert 1 <= len(states) < 5
    assert not leftovers(workspace)
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    retrograd("train", workspace.toml(**tables()), "--resume")
    assert workspace.adapter == whole
