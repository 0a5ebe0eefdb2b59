"""A run that is made longer: `--resume` with more updates ends as one that was as long from the start."""

from __future__ import annotations

from typing import Any

import pytest

from .support import Rollouts

CHECKPOINT: dict[str, Any] = {"directory": "checkpoints", "mode": "steps", "every_steps": 1}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_more_updates(rollouts: Rollouts, algorithm: str) -> None:
    def path(updates: int, **training: Any) -> Any:
        tables = {algorithm: {"updates": updates}, "checkpoint": CHECKPOINT, "training": training}
        return getattr(rollouts, algorithm)(**tables)

    rollouts.train(path(4))
    whole, records = rollouts.adapter, [r["train/loss"] for r in rollouts.updates()]
    for name in ("out", "checkpoints"):
        (rollouts / name).rename(rollouts / f"{name}.whole")
    rollouts.train(path(2))
    found = rollouts.train(path(4), "--resume")
    assert "after step 2" in found.err
    assert "finished after 4 steps" in found.out
    assert rollouts.adapter == whole
    assert [r["train/loss"] for r in rollouts.updates()] == records
    # Fewer than before cannot be had, and other settings stay what they were.
    state = rollouts / "checkpoints" / "step-000004.state"
    found = rollouts.train(path(3), "--resume", state, code=1)
    assert f"{algorithm}.updates: 4 in the checkpoint, 3 now" in "\n".join(found.errors)
    found = rollouts.train(path(9, lr=0.02), "--resume", state, code=1)
    assert "training.lr: 0.01 in the checkpoint, 0.02 now" in "\n".join(found.errors)
    assert f"{algorithm}.updates" not in "\n".join(found.errors)


def test_a_schedule_that_decays_has_the_length_of_its_run(rollouts: Rollouts) -> None:
    def path(updates: int, **training: Any) -> Any:
        return rollouts.grpo(grpo={"updates": updates}, checkpoint=CHECKPOINT, training=training)

    linear = {"lr_scheduler": "linear", "warmup_steps": 2}
    rollouts.train(path(4, **linear))
    text = "\n".join(rollouts.train(path(5, **linear), "--resume", code=1).errors)
    assert "is of a run of 4 steps, this one has 5" in text
    assert "lr_scheduler decays to the end of the run" in text
    assert "or start a new one from " in text
    # As long as nothing has decayed the rates are those of any length.
    state = rollouts / "checkpoints" / "step-000003.state"
    rollouts.train(path(5, **linear), "--resume", state)
    resumed = rollouts.adapter
    rollouts.train(path(5, **linear))
    assert rollouts.adapter == resumed
