"""Hooks that look at rollouts, and change what is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from retrograd.assembly import assemble
from retrograd.cli.document import open_document
from retrograd.errors import RolloutError
from retrograd.progress import SilentReporter
from retrograd.session import make_run
from retrograd_hookspecs import RolloutGroup, StepReport, hookimpl

from .support import Rollouts

Change = Callable[[Sequence[RolloutGroup]], None]


def changed(rollouts: Rollouts, algorithm: str, change: Change) -> list[StepReport]:
    """Reports of a run of one update whose rollouts a hook changes."""
    reports: list[StepReport] = []

    class Hooks:
        @hookimpl
        def retrograd_rollouts_ready(self, run: Any, groups: Sequence[RolloutGroup]) -> None:
            change(groups)

        @hookimpl
        def retrograd_step_finished(self, run: Any, report: StepReport) -> None:
            reports.append(report)

    make = {"grpo": rollouts.grpo, "ppo": rollouts.ppo}[algorithm]
    path = make(**{algorithm: {"updates": 1}})
    assembly = assemble(open_document(path, model=None, device=None, overrides=()))
    assembly.session.register(Hooks(), "hooks")
    make_run(assembly, SilentReporter()).execute()
    return reports


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_hook_leaves_an_answer_out(rollouts: Rollouts, algorithm: str) -> None:
    def change(groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            for number, rollout in enumerate(group.members):
                rollout.total = float(number + len(group.source + rollout.id) % 3)
        groups[0].members[0].excluded = "not this one"
        groups[0].members[0].total = None
        groups[1].members[0].total = 9.0

    [report] = changed(rollouts, algorithm, change)
    assert report.metrics["batch/answers_trained"] == {"grpo": 5, "ppo": 3}[algorithm]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_hook_drops_a_group(rollouts: Rollouts, algorithm: str) -> None:
    def change(groups: Sequence[RolloutGroup]) -> None:
        groups[0].dropped = "too easy"

    [report] = changed(rollouts, algorithm, change)
    assert report.metrics["batch/answers_trained"] == 3


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_hook_shapes_rewards(rollouts: Rollouts, algorithm: str) -> None:
    def change(groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            for number, rollout in enumerate(group.members):
                rollout.total = 100.0 + number + len(group.source)

    [report] = changed(rollouts, algorithm, change)
    assert report.metrics["reward/total_mean"] > 100
    assert report.metrics["reward/max"] <= 1.0  # as they were given


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_reward_that_a_hook_takes_away_is_not_a_zero(
    rollouts: Rollouts, algorithm: str, value: float | None
) -> None:
    def change(groups: Sequence[RolloutGroup]) -> None:
        groups[1].members[0].total = value

    with pytest.raises(RolloutError, match=r"a hook left rewards .* `excluded` leaves an answer out"):
        changed(rollouts, algorithm, change)
