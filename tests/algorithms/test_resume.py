"""A run that is stopped at any moment of an update and resumed ends as one that was not, byte for byte."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from retrograd.checkpoint import CheckpointStore
from retrograd.engine import TrainingEngine
from retrograd.engine.generation import DecodingBatch
from retrograd.run import Run
from retrograd.update import Updater
from retrograd_hookspecs import RolloutError
from retrograd_plugins.algorithms._base import RolloutAlgorithm
from retrograd_plugins.algorithms._rollouts import Answerer
from retrograd_plugins.rewards.python import PythonReward

from .support import Rollouts

SHARED: dict[str, Any] = {
    "training": {"lr": 0.02, "lr_scheduler": "linear", "warmup_steps": 2},
    "evaluation": {"data": "heldout.jsonl", "every_iterations": 2},
    "observe": {"directory": "observe"},
    "checkpoint": {"directory": "checkpoints", "mode": "steps_and_best_eval", "every_steps": 2},
}
GRPO = {
    "updates": 3,
    "grpo_epochs": 3,
    "prompt_order": "shuffled",
    "kl_coefficient": 0.1,
    "kl_schedule": {"warmup_updates": 1, "target": 0.005},
    "dynamic_sampling": {"max_resample_factor": 3},
    "importance_sampling_level": "sequence",
}
PPO = {"updates": 4, "ppo_epochs": 2}
EQUAL_REWARDS = """
import zlib

def score(prompt, completion):
    if prompt == "say 3":
        return 0.5   # a group without spread: another one is drawn
    return zlib.crc32((prompt + completion).encode()) % 11 / 10
"""
PHASES: Mapping[str, tuple[type, str]] = {
    "while answers are drawn": (DecodingBatch, "step"),
    "while the reward is asked": (PythonReward, "score"),
    "in a pass": (TrainingEngine, "_train_pass"),
    "before the optimizer": (Updater, "__call__"),
    "between two steps": (Run, "_after_step"),
    "before an evaluation": (RolloutAlgorithm, "evaluate"),
    "while a checkpoint is written": (CheckpointStore, "_publish"),
}
"""A method that is called in each phase of a run."""
RECORDED = ("reward/mean", "policy/entropy", "batch/groups", "train/loss", "train/epoch")
OF_ALGORITHM = ("while the reward is asked", "in a pass", "between two steps")
"""Phases in which another algorithm has a state of its own."""


def path_of(rollouts: Rollouts, algorithm: str, **tables: Any) -> Path:
    rollouts.python("reward.py", EQUAL_REWARDS)
    if algorithm == "grpo":
        return rollouts.grpo(**{**SHARED, **tables}, grpo=GRPO)
    return rollouts.ppo(**{**SHARED, **tables}, ppo=PPO)


class Counted:
    """Replaces a method by one that counts its calls, and acts in call `at`."""

    def __init__(
        self, owner: type, name: str, patch: pytest.MonkeyPatch, action: Callable[[], None], at: int = 0
    ) -> None:
        self.calls = 0
        original = getattr(owner, name)

        def method(*arguments: Any, **keys: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                action()
            return original(*arguments, **keys)

        patch.setattr(owner, name, method)


def nothing() -> None: ...


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def trace(rollouts: Rollouts) -> list[tuple[Any, ...]]:
    """What a run said of itself, without times: each record once."""
    names = ("train/loss", "optimizer/grad_norm", "policy/kl_coefficient", "eval/reward", "train/update")
    return [(r["step"], *(r.get(name) for name in names)) for r in rollouts.metrics()]


def observed(rollouts: Rollouts) -> dict[int, tuple[Any, ...]]:
    """By update, what was recorded of it last: its rollouts, and metrics without times."""
    updates: dict[int, tuple[Any, ...]] = {}
    parts: list[Any] = []
    for line in (rollouts / "observe" / "observe.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        fields = {k: v for k, v in record.items() if k not in ("time", "segment")}
        if record["kind"] == "update":
            metrics = {k: v for k, v in record["metrics"].items() if k in RECORDED}
            updates[record["update"]] = (parts, metrics)
        parts = [] if record["kind"] in ("run", "update", "evaluation") else [*parts, fields]
    return updates


class Whole:
    """The undisturbed run, done once, and how often each phase comes in it."""

    def __init__(self, rollouts: Rollouts, algorithm: str) -> None:
        self.path = path_of(rollouts, algorithm)
        with pytest.MonkeyPatch.context() as patch:
            counted = {phase: Counted(*place, patch, nothing) for phase, place in PHASES.items()}
            rollouts.train(self.path)
        phases = PHASES if algorithm == "grpo" else OF_ALGORITHM
        self.calls = {phase: counted[phase].calls for phase in phases}
        self.adapter, self.trace, self.observed = rollouts.adapter, trace(rollouts), observed(rollouts)
        assert all(rolled and metrics.keys() == set(RECORDED) for rolled, metrics in self.observed.values())

    def resumed(self, rollouts: Rollouts) -> None:
        """Resume, and compare."""
        found = rollouts.train(self.path, "--resume")
        assert "resumed from" in found.err
        assert rollouts.adapter == self.adapter
        assert trace(rollouts) == self.trace
        assert observed(rollouts) == self.observed


def clear(rollouts: Rollouts) -> None:
    for name in ("out", "checkpoints", "observe"):
        if (rollouts / name).exists():
            (rollouts / name).rename(rollouts / f"{name}.{len(list(rollouts.directory.iterdir()))}")


def in_a_fork(work: Callable[[], None]) -> int:
    """Status of a child process that does `work` and ends."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_sigkill_at_every_phase(rollouts: Rollouts, algorithm: str) -> None:
    whole = Whole(rollouts, algorithm)
    for number, (phase, calls) in enumerate(whole.calls.items()):
        clear(rollouts)
        few = phase in ("before an evaluation", "while a checkpoint is written")
        at = calls - 1 if few and calls > 2 else max(calls * (4 + number % 5) // 9, 1)

        def killed(phase: str = phase, at: int = at) -> None:
            with pytest.MonkeyPatch.context() as patch:
                Counted(*PHASES[phase], patch, kill, at)
                rollouts.train(whole.path, code=None)

        assert in_a_fork(killed) == -signal.SIGKILL, phase
        assert rollouts.states(), phase
        whole.resumed(rollouts)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_ctrl_c_at_every_phase(rollouts: Rollouts, algorithm: str) -> None:
    whole = Whole(rollouts, algorithm)
    for number, (phase, calls) in enumerate(whole.calls.items()):
        clear(rollouts)
        with pytest.MonkeyPatch.context() as patch:
            Counted(*PHASES[phase], patch, interrupt, max(calls * (3 + number % 5) // 9, 1))
            found = rollouts.train(whole.path, code=1)
        assert "interrupted after" in found.out, phase
        assert "go on with: retrograd train" in found.err
        whole.resumed(rollouts)


@pytest.mark.parametrize("call", [1, 3])
def test_ctrl_c_gives_up_the_answers_that_are_drawn(rollouts: Rollouts, call: int) -> None:
    """The update is drawn anew after the resume, from the same streams; in the first one too."""
    path = path_of(rollouts, "grpo", checkpoint=None, evaluation=None)
    rollouts.train(path)
    whole = rollouts.adapter
    clear(rollouts)
    with pytest.MonkeyPatch.context() as patch:
        passes = Counted(DecodingBatch, "step", patch, interrupt, 10 * call)
        asked = Counted(PythonReward, "score", patch, nothing)
        found = rollouts.train(path, code=1)
    assert passes.calls == 10 * call  # not one pass more
    assert asked.calls < 3 + call
    assert "interrupted after" in found.out
    rollouts.train(path, "--resume")
    assert rollouts.adapter == whole


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_failure_while_collecting_loses_nothing(rollouts: Rollouts, algorithm: str, call: int) -> None:
    """The prompts of the update that failed are drawn again, though the failed run saved its state."""
    path = path_of(rollouts, algorithm, checkpoint=None, evaluation=None)
    rollouts.train(path)
    whole = rollouts.adapter
    clear(rollouts)

    def fail() -> None:
        raise RolloutError("the grader is gone")

    with pytest.MonkeyPatch.context() as patch:
        Counted(PythonReward, "score", patch, fail, call)
        found = rollouts.train(path, code=1)
    assert found.errors[0] == "error: the grader is gone"
    states = rollouts.states("out/adapter.checkpoints")
    assert bool(states) == ("go on from step" in found.err)
    assert states or call < 3
    rollouts.train(path, *(["--resume"] if states else []))
    assert rollouts.adapter == whole


def test_an_evaluation_that_failed_is_done_after_the_resume(rollouts: Rollouts) -> None:
    path = path_of(rollouts, "ppo", checkpoint=None, evaluation={"data": "heldout.jsonl"})
    rollouts.train(path)
    whole, expected = rollouts.adapter, trace(rollouts)
    clear(rollouts)

    def fail() -> None:
        raise RolloutError("the grader is gone")

    with pytest.MonkeyPatch.context() as patch:
        Counted(PythonReward, "score", patch, fail, 5)  # 1 before training, 2 and 3, 4 and 5
        rollouts.train(path, code=1)
    rollouts.train(path, "--resume")
    assert rollouts.adapter == whole
    assert trace(rollouts) == expected


def test_killed_in_every_update(rollouts: Rollouts) -> None:
    """A chain of processes that each die while answers are drawn."""
    whole = Whole(rollouts, "grpo")
    clear(rollouts)
    for turn in range(2):

        def killed(turn: int = turn) -> None:
            with pytest.MonkeyPatch.context() as patch:
                Counted(Answerer, "draw", patch, kill, 3)
                rollouts.train(whole.path, *(["--resume"] if turn else []), code=None)

        assert in_a_fork(killed) == -signal.SIGKILL
    whole.resumed(rollouts)
