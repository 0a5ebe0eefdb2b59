"""Ctrl-C and SIGTERM, sent to a real process while it trains."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from .support import Workspace, finish_process, hook_file, retrograd, start_process, wait_for

WAIT = """
@hookimpl
def retrograd_step_finished(run, report):
    if report.step == 5 and not Path({go!r}).exists():
        Path({reached!r}).touch()
        while not Path({go!r}).exists():
            time.sleep(0.01)
"""


@pytest.fixture
def path(workspace: Workspace) -> Path:
    """A run that waits at step 5 for the file `go`, and says so with the file `reached`."""
    body = WAIT.format(go=str(workspace / "go"), reached=str(workspace / "reached"))
    hook_file(workspace / "wait.py", body)
    return workspace.toml(
        checkpoint={"directory": "checkpoints", "mode": "steps", "every_steps": 3},
        plugins={"load": ["wait.py"]},
    )


def whole_run(workspace: Workspace) -> bytes:
    """The adapter of the same run without an interruption."""
    (workspace / "go").touch()
    retrograd("train", workspace / "run.toml")
    return workspace.adapter


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_once_finishes_the_step_and_saves(workspace: Workspace, path: Path, number: signal.Signals) -> None:
    process = start_process("train", path)
    wait_for(workspace / "reached", process)
    process.send_signal(number)
    (workspace / "go").touch()
    found = finish_process(process, ("train",), code=1)

    assert "stopping after this step" in found.err
    assert "interrupted after 5 steps" in found.out
    assert workspace.states() == ["step-000003.state", "step-000005.state"]
    # The output is what five steps trained, the same as beside the checkpoint.
    assert workspace.adapter == (workspace / "checkpoints" / "step-000005.gguf").read_bytes()
    line = re.search(r"go on with: (retrograd train .+)", found.err)
    assert line is not None
    command = shlex.split(line[1])
    state = workspace / "checkpoints" / "step-000005.state"
    assert command == ["retrograd", "train", str(path), "--resume", str(state)]
    retrograd(*command[1:])
    resumed = workspace.adapter
    assert resumed == whole_run(workspace)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_twice_stops_at_once(workspace: Workspace, path: Path, number: signal.Signals) -> None:
    process = start_process("train", path)
    wait_for(workspace / "reached", process)
    process.send_signal(number)
    announced = read_until(process, "stopping after this step")
    process.send_signal(number)  # the step never ends: `go` is not there
    found = finish_process(process, ("train",), code=130)

    assert "stopped" in found.err
    assert "Traceback" not in announced
    assert not (workspace / "out" / "adapter.gguf").exists()
    assert workspace.states() == ["step-000003.state"]
    (workspace / "go").touch()
    retrograd("train", path, "--resume")
    resumed = workspace.adapter
    assert resumed == whole_run(workspace)


def test_without_a_checkpoint_section_an_interruption_still_saves(workspace: Workspace, path: Path) -> None:
    path = workspace.toml(plugins={"load": ["wait.py"]})
    process = start_process("train", path)
    wait_for(workspace / "reached", process)
    process.send_signal(signal.SIGINT)
    (workspace / "go").touch()
    found = finish_process(process, ("train",), code=1)
    line = re.search(r"go on with: (retrograd train .+)", found.err)
    assert line is not None
    retrograd(*shlex.split(line[1])[1:])
    resumed = workspace.adapter
    retrograd("train", path, "--resume")  # bare: finds the same checkpoint
    assert workspace.adapter == resumed
    assert resumed == whole_run(workspace)


def test_the_line_that_goes_on_repeats_the_options(workspace: Workspace) -> None:
    hook_file(
        workspace / "stop.py",
        "@hookimpl\ndef retrograd_step_finished(run, report):\n"
        "    if report.step == 2:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n",
    )
    path = workspace.toml("my run.toml", model={"path": "absent.gguf"}, plugins={"load": ["stop.py"]})
    options = ["--set", "training.lr=1e-3", "--set", 'lora.targets=["q", "v"]', "--model", workspace.model]
    found = retrograd("train", path, *options, code=1)
    line = re.search(r"go on with: (retrograd train .+)", found.err)
    assert line is not None
    (workspace / "stop.py").write_text("")
    retrograd(*shlex.split(line[1])[1:])
    resumed = workspace.adapter
    retrograd("train", path, *options)
    assert workspace.adapter == resumed


def test_ctrl_c_while_the_model_loads_is_no_traceback(workspace: Workspace) -> None:
    hook_file(
        workspace / "slow.py",
        f"Path({str(workspace / 'reached')!r}).touch()\ntime.sleep(60)\n",
    )
    process = start_process("train", workspace.toml(plugins={"load": ["slow.py"]}))
    wait_for(workspace / "reached", process)
    process.send_signal(signal.SIGINT)
    found = finish_process(process, ("train",), code=130)
    assert "stopped" in found.err


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read stderr up to the line that holds `text`."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was not said:\n{seen}")
