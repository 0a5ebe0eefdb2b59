"""From trajectories that ended to groups of rollouts: what is graded, dropped, cut, and what its tokens
earn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np

from retrograd.advantages import group_advantages, intermediate_returns
from retrograd.agent.play import Played
from retrograd_hookspecs import Rollout, RolloutError, RolloutGroup, Scenario

from ._judging import FAILED
from ._rollouts import all_equal

EQUAL = "all rewards are equal"
DEGENERATE = "the judge scored all the same"
SETUP = "setup failed"


def rollout_of(played: Played, id: str) -> Rollout:
    """A trajectory as a rollout; what cannot be trained is excluded, with the reason."""
    tokens, trained, logp = played.trajectory.arrays()
    said = [message.content for message in played.trajectory.messages if message.role == "assistant"]
    rollout = Rollout(
        id=id,
        tokens=tokens,
        trained=trained,
        logp=logp,
        completion=said[-1] if said else "",
        messages=tuple(played.trajectory.messages),
        finish="length" if played.truncated else "stop",
        reward=played.reward,
        step_rewards=tuple(played.step_rewards),
        final_state=played.final_state,
        metrics={
            "turns": played.turns,
            "tool_calls": played.calls,
            "failed_calls": played.failed_calls,
            "seconds": played.seconds,
        },
    )
    if played.failed:
        rollout.excluded = f"failed: {played.failed}"
    elif played.truncated:
        rollout.excluded = f"truncated: {played.truncated}"
    return rollout


def group_of(scenario: Scenario, members: Sequence[Played], id: str) -> RolloutGroup:
    """The trajectories of one scenario. One whose world never started fails the group's setup."""
    group = RolloutGroup(
        id=id,
        source=scenario.origin or scenario.id,
        messages=members[0].trajectory.opening,
        prompt_tokens=members[0].trajectory.prompt_tokens,
        members=[rollout_of(played, f"{id}.{number}") for number, played in enumerate(members)],
        rubric=scenario.rubric,
        metadata={"scenario": scenario.id, **scenario.metadata},
    )
    broken = [played.failed for played in members if played.setup_failed]
    if broken:
        group.dropped = f"{SETUP}: {broken[0]}"
    return group


def graded(group: RolloutGroup) -> bool:
    """True if the environment gave every member that is left a reward, 0.0 included."""
    left = [rollout for rollout in group.members if not rollout.excluded]
    return bool(left) and all(rollout.reward.kind == "value" for rollout in left)


def take_totals(group: RolloutGroup) -> None:
    """The environment's rewards are the totals; who has none is left out."""
    for rollout in group.members:
        if rollout.reward.kind == "value":
            rollout.total = rollout.reward.value
        elif not rollout.excluded:
            why = rollout.reward.explanation
            rollout.excluded = f"unscored: {rollout.reward.kind}{f' ({why})' if why else ''}"


def take_verdicts(group: RolloutGroup) -> None:
    """The judge's scores, with the rewards of steps, are the totals."""
    for rollout in group.members:
        if not rollout.excluded and rollout.judgement is not None and rollout.judgement.kind == "value":
            rollout.total = rollout.judgement.value + sum(reward for _, reward in rollout.step_rewards)


def cut_members(group: RolloutGroup, truncation: Literal["drop", "min_reward"]) -> None:
    """With "min_reward" a trajectory that hit a limit earns the lowest total of its group."""
    if truncation != "min_reward":
        return
    totals = [r.total for r in group.members if r.total is not None and not r.excluded]
    if not totals:
        return
    for rollout in group.members:
        if rollout.excluded.startswith("truncated") and rollout.trained.any():
            rollout.excluded = ""
            rollout.total = min(totals)


def take_advantages(group: RolloutGroup, *, judged: bool, drop_degenerate: bool) -> None:
    """Advantages of all tokens that the policy wrote: those of the group, and of steps within a
    trajectory. A group in which all of them are 0 is dropped, or kept if a judge compared it and
    `drop_degenerate` is False."""
    if group.dropped:
        return
    members = [rollout for rollout in group.members if not rollout.excluded]
    if len(members) < 2:
        reasons = [rollout.excluded for rollout in group.members if rollout.excluded]
        group.dropped = f"fewer than two trajectories are left: {reasons[0] if reasons else 'no reward'}"
        return
    if any(rollout.total is None for rollout in members):
        raise RolloutError(f"{group.source}: a hook took a total away: it must set `excluded` too")
    totals = [rollout.total for rollout in members if rollout.total is not None]
    if not np.all(np.isfinite(totals)):
        raise RolloutError(f"{group.source}: a hook made a total {totals}: totals are finite numbers")
    advantages = np.zeros(len(totals)) if all_equal(totals) else group_advantages(totals)
    for rollout, advantage in zip(members, advantages, strict=True):
        rollout.advantage = np.where(rollout.trained, advantage, 0.0)
        if rollout.step_rewards:
            positions = np.flatnonzero(rollout.trained)
            starts = np.array([start for start, _ in rollout.step_rewards])
            rewards = [reward for _, reward in rollout.step_rewards]
            rollout.advantage[positions] += intermediate_returns(rewards, starts, positions)
    if any(np.any(rollout.advantage) for rollout in members):
        return
    if not judged:
        group.dropped = EQUAL
    elif drop_degenerate:
        group.dropped = DEGENERATE


def usable(group: RolloutGroup) -> int:
    """Trajectories of a group that could be trained, or that say that there is nothing to learn."""
    if group.dropped not in ("", EQUAL, DEGENERATE):
        return 0
    return sum(not rollout.excluded for rollout in group.members)


@attrs.frozen(kw_only=True)
class Losses:
    """Trajectories of an update that are not trained, each counted once."""

    truncated: int
    failed: int
    unscored: int
    total: int

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], truncation: str) -> Losses:
        """Count them. With "min_reward" a truncated one is lost only if its group has no reward to take."""
        truncated = failed = unscored = total = 0
        for group in groups:
            lost_group = group.dropped.startswith((SETUP, FAILED))
            for rollout in group.members:
                total += 1
                if rollout.excluded.startswith("truncated"):
                    truncated += 1
                elif rollout.excluded.startswith("failed"):
                    failed += 1
                elif rollout.excluded or lost_group:
                    unscored += 1
        return cls(truncated=truncated, failed=failed, unscored=unscored, total=total)

    @property
    def fraction(self) -> float:
        """Share of all trajectories."""
        return (self.truncated + self.failed + self.unscored) / max(self.total, 1)

    def check(self, most: float, groups: Sequence[RolloutGroup], update: int) -> None:
        """Raise `RolloutError` if more were lost than may be."""
        if self.fraction <= most:
            return
        reasons = [r.excluded for group in groups for r in group.members if r.excluded]
        reasons += [group.dropped for group in groups if group.dropped]
        first = f"; first: {reasons[0]}" if reasons else ""
        raise RolloutError(
            f"update {update} lost {self.fraction:.0%} of its {self.total} trajectories, more than"
            f" max_dropped_fraction = {most:g}: {self.truncated} truncated, {self.failed} failed,"
            f" {self.unscored} without a reward{first}"
        )
