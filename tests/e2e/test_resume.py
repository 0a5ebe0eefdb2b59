"""A run that is killed and resumed ends with the byte-identical adapter of one that was not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from .support import Workspace, hook_file, killed, retrograd, retrograd_process

KILL = """
@hookimpl
def retrograd_step_finished(run, report):
    marker = Path({marker!r})
    if report.step == {step} and not marker.exists():
        marker.touch()
        {action}
"""
AT_ONCE = "os.kill(os.getpid(), signal.SIGKILL)"
A_LITTLE_LATER = "threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGKILL)).start()"


@attrs.frozen(kw_only=True)
class Case:
    """Settings of a run, and how it is resumed."""

    training: Mapping[str, Any] = attrs.field(factory=dict)
    lora: Mapping[str, Any] = attrs.field(factory=dict)
    mode: str = "steps"
    device: str = "reference"
    tables: Mapping[str, Any] = attrs.field(factory=dict)
    by_path: bool = False


CASES = {
    "plain": Case(),
    "path": Case(by_path=True),
    "accumulation": Case(training={"micro_batch": 32, "gradient_accumulation": 2}),
    "long-sequences": Case(training={"micro_batch": 16, "gradient_accumulation": 2}, by_path=True),
    "gradient-checkpointing": Case(
        training={
            "gradient_checkpointing": True,
            "checkpoint_every_n_layers": 1,
            "checkpoint_dtype": "bf16",
        }
    ),
    "steps-and-best": Case(
        mode="steps_and_best_eval",
        training={"epochs": 3},
        tables={"evaluation": {"data": "heldout.jsonl", "patience": 2}},
    ),
    "best-only": Case(
        mode="best_eval", training={"epochs": 3}, tables={"evaluation": {"data": "heldout.jsonl"}}
    ),
    "cosine-warmup": Case(training={"lr_scheduler": "cosine", "warmup_steps": 4}),
    "linear-decay": Case(training={"lr_scheduler": "linear", "weight_decay": 0.1}),
    "f32": Case(lora={"dtype": "f32"}),
    "sgd": Case(
        training={"optimizer": "sgd", "lr": 0.05},
        tables={"optimizer": {"sgd": {"momentum": 0.9}}},
    ),
    "cpu": Case(device="cpu"),
    "cpu-long-sequences": Case(
        device="cpu",
        mode="steps_and_best_eval",
        training={"micro_batch": 16, "gradient_accumulation": 4, "epochs": 3},
        tables={"evaluation": {"data": "heldout.jsonl"}},
    ),
}


@pytest.mark.parametrize(
    ("name", "seed"), [*((name, 0) for name in CASES), ("plain", 1), ("accumulation", 1), ("cpu", 1)]
)
def test_sigkill_and_resume(workspace: Workspace, name: str, seed: int) -> None:
    case, rng = CASES[name], random.Random(f"{name} {seed}")
    every = rng.randint(1, 4)

    def settings(load: list[str]) -> dict[str, Any]:
        checkpoint = {"directory": "checkpoints", "mode": case.mode, "every_steps": every}
        if case.mode == "best_eval":
            del checkpoint["every_steps"]
        return {
            "model": {"device": case.device},
            "training": {"epochs": 2, **case.training},
            "lora": case.lora,
            "checkpoint": checkpoint,
            "plugins": {"load": load},
            **case.tables,
        }

    retrograd("train", workspace.toml(**settings([])))
    whole = workspace.adapter
    losses, held_out = workspace.losses(), workspace.held_out()
    total = max(losses)
    one_epoch = total // case.training.get("epochs", 2)
    for path in (workspace / "checkpoints", workspace / "out"):
        path.rename(path.with_name(path.name + ".whole"))

    # The first checkpoint follows the hooks of step `every`, or the first evaluation.
    first = one_epoch + 2 if case.mode == "best_eval" else every + 1
    step = rng.randint(first, total - 1)
    action = AT_ONCE if rng.random() < 0.5 else A_LITTLE_LATER.format(seconds=rng.uniform(0, 0.02))
    hook_file(
        workspace / "kill.py",
        KILL.format(marker=str(workspace / "killed"), step=step, action=action),
    )
    path = workspace.toml(**settings(["kill.py"]))
    outcome = retrograd_process("train", path, code=None)
    assert killed(outcome), outcome
    assert not (workspace / "out" / "adapter.gguf").exists()
    states = workspace.states()
    assert states

    resume = ["--resume", str(workspace / "checkpoints" / states[-1])] if case.by_path else ["--resume"]
    found = retrograd("train", path, *resume)
    assert "resumed from" in found.err
    assert workspace.adapter == whole
    assert workspace.losses() == losses
    assert workspace.held_out() == held_out


def test_killed_again_and_again(workspace: Workspace) -> None:
    """Every process does a few steps and dies; the chain of them ends where one process does."""
    tables: dict[str, Any] = {"checkpoint": {"directory": "checkpoints", "mode": "steps", "every_steps": 3}}
    retrograd("train", workspace.toml(**tables))
    whole, losses = workspace.adapter, workspace.losses()
    for path in (workspace / "checkpoints", workspace / "out"):
        path.rename(path.with_name(path.name + ".whole"))
    hook_file(
        workspace / "kill.py",
        "@hookimpl\ndef retrograd_checkpoint_saved(run, path):\n"
        "    count = len(list(path.parent.glob('*.state')))\n"
        "    if count in (1, 2):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    path = workspace.toml(**tables, plugins={"load": ["kill.py"]})
    assert killed(retrograd_process("train", path, code=None))
    assert killed(retrograd_process("train", path, "--resume", code=None))
    retrograd("train", path, "--resume")
    assert workspace.adapter == whole
    assert workspace.losses() == losses


def test_a_bare_resume_may_stand_before_the_file(workspace: Workspace) -> None:
    path = workspace.toml(checkpoint={"directory": "checkpoints", "mode": "steps", "every_steps": 4})
    retrograd("train", path)
    whole = workspace.adapter
    assert "resumed from" in retrograd("train", "--resume", path).err
    assert workspace.adapter == whole
    found = retrograd("train", "--resume", workspace / "checkpoints" / "step-000004.state", code=2)
    assert "Missing argument 'CONFIG'" in found.err


def test_resume_from_in_the_file(workspace: Workspace) -> None:
    checkpoint = {"directory": "checkpoints", "mode": "steps", "every_steps": 4}
    retrograd("train", workspace.toml(checkpoint=checkpoint))
    whole = workspace.adapter
    checkpoint["resume_from"] = "checkpoints/step-000004.state"
    found = retrograd("train", workspace.toml(checkpoint=checkpoint))
    assert "after step 4" in found.err
    assert workspace.adapter == whole


def test_a_finished_run_resumes_to_the_same_result(workspace: Workspace) -> None:
    path = workspace.toml(checkpoint={"directory": "checkpoints", "mode": "steps", "every_steps": 1})
    retrograd("train", path)
    whole = workspace.adapter
    (workspace / "out" / "adapter.gguf").unlink()
    retrograd("train", path, "--resume")
    assert workspace.adapter == whole


def test_more_epochs(workspace: Workspace) -> None:
    """A finished run goes on with more of them, to the result of one that had as many from the start."""

    def path(epochs: int) -> Path:
        checkpoint = {"directory": "checkpoints", "mode": "steps", "every_steps": 1}
        return workspace.toml(checkpoint=checkpoint, training={"epochs": epochs})

    retrograd("train", path(2))
    whole, losses = workspace.adapter, workspace.losses()
    (workspace / "checkpoints").rename(workspace / "checkpoints.whole")
    retrograd("train", path(1))
    retrograd("train", path(2), "--resume")
    assert workspace.adapter == whole
    assert workspace.losses() == losses


def test_a_run_that_lost_patience_stays_stopped_until_it_has_more(workspace: Workspace) -> None:
    """Also where it was killed before it could write its result."""

    def path(patience: int) -> Path:
        return workspace.toml(
            training={"lr": 0.0, "epochs": 5},
            evaluation={"data": "heldout.jsonl", "patience": patience},
            checkpoint={"directory": "checkpoints", "mode": "steps", "every_steps": 1},
        )

    stopped = retrograd("train", path(2)).out
    assert "stopped early after" in stopped
    steps = max(workspace.losses())
    (workspace / "out" / "adapter.gguf").unlink()
    found = retrograd("train", path(2), "--resume")
    assert f"stopped early after {steps} steps" in found.out
    assert "no improvement in 2 evaluations" in found.err
    assert max(workspace.losses()) == steps
    found = retrograd("train", path(3), "--resume")
    assert f"stopped early after {steps * 4 // 3} steps" in found.out


def test_a_moved_folder_resumes(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Paths may change; what is in the files decides."""
    tables: dict[str, Any] = {"checkpoint": {"directory": "checkpoints", "mode": "steps", "every_steps": 4}}
    path = workspace.toml(**tables, evaluation={"data": "heldout.jsonl"})
    retrograd("train", path)
    whole = workspace.adapter
    elsewhere = tmp_path_factory.mktemp("moved") / "folder"
    workspace.directory.rename(elsewhere)
    retrograd("train", elsewhere / path.name, "--resume", elsewhere / "checkpoints" / "step-000004.state")
    assert (elsewhere / "out" / "adapter.gguf").read_bytes() == whole


def test_a_run_that_started_from_an_adapter_resumes(workspace: Workspace) -> None:
    """`init_adapter` and a resume exclude each other; what the message says to write instead works."""
    retrograd("train", workspace.toml(lora={"rank": 2, "alpha": 4.0, "targets": ["q", "ffn_up"]}))
    (workspace / "out" / "adapter.gguf").rename(workspace / "first.gguf")
    tables: dict[str, Any] = {
        "lora": {"rank": None, "init_adapter": "first.gguf"},
        "checkpoint": {"directory": "checkpoints", "mode": "steps", "every_steps": 5},
    }
    path = workspace.toml(**tables)
    retrograd("train", path)
    whole = workspace.adapter
    state = workspace / "checkpoints" / "step-000005.state"
    refused = retrograd("train", path, "--resume", state, code=2)
    assert "lora.init_adapter: cannot be combined with a resume (--resume)" in refused.err
    assert "give the other keys as they are in the checkpoint" in refused.err

    tables["lora"] = {"rank": None}
    refused = retrograd("train", workspace.toml(**tables), "--resume", state, code=1)
    assert "lora.rank: 2 in the checkpoint, 8 now" in refused.err
    assert "lora.alpha: 4.0 in the checkpoint, 16.0 now" in refused.err
    tables["lora"] = {"rank": 2, "alpha": 4.0, "targets": ["q", "ffn_up"]}
    retrograd("train", workspace.toml(**tables), "--resume", state)
    assert workspace.adapter == whole


def test_two_runs_in_one_checkpoint_directory(workspace: Workspace) -> None:
    """A bare `--resume` takes the newest checkpoint that a run with these settings wrote."""
    checkpoint = {"directory": "checkpoints", "mode": "steps", "every_steps": 3}
    slow = workspace.toml("slow.toml", checkpoint=checkpoint, training={"lr": 1e-3})
    retrograd("train", slow)
    slow_adapter = workspace.adapter
    hook_file(
        workspace / "stop.py",
        "@hookimpl\ndef retrograd_step_finished(run, report):\n"
        "    if report.step == 4 and not Path(run.output.parent / 'stopped').exists():\n"
        "        Path(run.output.parent / 'stopped').touch()\n"
        "        raise ValueError('stop')\n",
    )
    fast = workspace.toml("fast.toml", checkpoint=checkpoint, plugins={"load": ["stop.py"]})
    retrograd("train", fast, code=1)
    assert workspace.states()[-1] == "step-000015.state"

    found = retrograd("train", slow, "--resume")
    assert "step-000004.state is newer, but was written by a run with other settings" in found.err
    assert "after step 15" in found.err
    assert workspace.adapter == slow_adapter
    found = retrograd("train", fast, "--resume")
    assert "after step 4" in found.err
    resumed = workspace.adapter
    retrograd("train", fast)
    assert workspace.adapter == resumed


def test_an_adapter_of_a_checkpoint_is_what_was_trained_by_then(workspace: Workspace) -> None:
    """The adapter beside a checkpoint is a usable result: starting from it gives the loss at that step."""
    path = workspace.toml(
        checkpoint={"directory": "checkpoints", "mode": "best_eval"}, evaluation={"data": "heldout.jsonl"}
    )
    retrograd("train", path)
    best = Path(workspace / "checkpoints" / "best.gguf")
    assert best.read_bytes() == workspace.adapter
