"""From trajectories to what is trained: totals, losses, advantages, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd.agent.play import Played
from retrograd_hookspecs import Rollout, RolloutError, RolloutGroup, Score, StepResult
from retrograd_plugins.algorithms._agents import (
    DEGENERATE,
    EQUAL,
    Losses,
    cut_members,
    graded,
    group_of,
    take_advantages,
    take_totals,
    take_verdicts,
    usable,
)

from .stand_ins import SCENARIO, Echoes, Speaker, play
from .support import call

SAY, END = call("say", text="hi"), call("end")


def played(*rewards: Score | float | str, steps: dict[int, list[float]] | None = None) -> list[Played]:
    """A group: a reward for each member, or the limit or failure that ended it ("!…")."""
    given = steps or {}

    def faults(number: int) -> dict[str, Callable[[], Any]]:
        rest = iter(given.get(number, []))
        reward = rewards[number]
        made: dict[str, Callable[[], Any]] = {
            "say": lambda: StepResult(observation="so", reward=next(rest, None)),
            "grade": lambda: (
                reward if isinstance(reward, Score) else Score(kind="value", value=float(reward))
            ),
        }
        if isinstance(reward, str):
            made["grade"] = lambda: Score(kind="missing")
            if reward.startswith("!"):
                made["reset" if reward == "!setup" else "end"] = _broken
        return made

    turns = {
        n: [SAY] * len(given.get(n, [])) + ([SAY] * 9 if reward == "turns" else [END])
        for n, reward in enumerate(rewards)
    }
    return play(Speaker(turns), Echoes(faults), count=len(rewards), max_turns=6)


def value(number: float) -> Score:
    return Score(kind="value", value=number)


def _broken() -> None:
    raise RolloutError("broke")


def group(*rewards: Score | float | str, **keys: Any) -> RolloutGroup:
    return group_of(SCENARIO, played(*rewards, **keys), "1.0")


def settled(
    found: RolloutGroup, truncation: Any = "drop", *, judged: bool = False, drop: bool = False
) -> RolloutGroup:
    (take_verdicts if judged else take_totals)(found)
    cut_members(found, truncation)
    take_advantages(found, judged=judged, drop_degenerate=drop)
    return found


def advantages(found: RolloutGroup) -> list[list[float]]:
    """Of each member's own tokens, without repetitions that follow each other."""
    shown = []
    for rollout in found.members:
        values = [] if rollout.advantage is None else rollout.advantage[rollout.trained].tolist()
        shown.append([v for n, v in enumerate(values) if n == 0 or v != values[n - 1]])
        if rollout.advantage is not None:
            assert not rollout.advantage[~rollout.trained].any()
    return shown


MISSING = Score(kind="missing")


def test_rewards_of_the_environment() -> None:
    found = settled(group(1.0, 0.0, 0.0, 1.0))
    assert graded(found)
    assert advantages(found) == [[0.5], [-0.5], [-0.5], [0.5]]
    assert [r.total for r in found.members] == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_rewards_are_graded_and_teach_nothing(value: float) -> None:
    found = group(value, value)
    assert graded(found)
    assert settled(found).dropped == EQUAL
    assert usable(found) == 2


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    assert settled(group(0.1 + 0.2, 0.3)).dropped == EQUAL


def test_partial_grades() -> None:
    """Without a judge, who has no reward is left out and counted; with one, all are compared by it."""
    error = Score(kind="error", explanation="no pytest")
    found = group(1.0, MISSING, 0.0, error)
    assert not graded(found)
    settled(found)
    assert [r.excluded for r in found.members] == ["", "unscored: missing", "", "unscored: error (no pytest)"]
    assert advantages(found) == [[0.5], [], [-0.5], []]
    assert Losses.of([found], "drop") == Losses(truncated=0, failed=0, unscored=2, total=4)


def test_truncated_and_failed_members_are_out() -> None:
    found = settled(group(1.0, "turns", "!end", 0.0))
    assert [r.excluded for r in found.members] == ["", "truncated: max_turns", "failed: broke", ""]
    assert advantages(found) == [[0.5], [], [], [-0.5]]
    losses = Losses.of([found], "drop")
    assert losses == Losses(truncated=1, failed=1, unscored=0, total=4)
    assert losses.fraction == 0.5
    losses.check(0.5, [found], 1)
    with pytest.raises(
        RolloutError, match=r"update 1 lost 50% of its 4 trajectories, more than max_dropped_fraction = 0\.4"
    ):
        losses.check(0.4, [found], 1)


def test_min_reward_keeps_truncated_members() -> None:
    found = settled(group(1.0, "turns", "!end", -2.0), "min_reward")
    assert [r.total for r in found.members] == [1.0, -2.0, None, -2.0]
    assert advantages(found) == [[2.0], [-1.0], [], [-1.0]]
    assert Losses.of([found], "min_reward") == Losses(truncated=0, failed=1, unscored=0, total=4)
    alone = settled(group("turns", "turns"), "min_reward")
    assert alone.dropped.startswith("fewer than two trajectories are left: truncated: max_turns")
    assert Losses.of([alone], "min_reward").truncated == 2


def test_fewer_than_two_survivors() -> None:
    found = settled(group(1.0, "turns", "!end"))
    assert found.dropped == "fewer than two trajectories are left: truncated: max_turns"
    assert usable(found) == 0


def test_a_setup_that_failed_drops_the_group() -> None:
    found = group(1.0, "!setup", 0.0)
    assert found.dropped == "setup failed: broke"
    settled(found)
    assert all(r.advantage is None for r in found.members)
    assert Losses.of([found], "drop") == Losses(truncated=0, failed=1, unscored=2, total=3)


def test_verdicts_and_steps_are_the_totals_of_a_judged_group() -> None:
    found = group(MISSING, MISSING, "turns", steps={1: [0.5]})
    for rollout, verdict in zip(found.members, (0.8, 0.4, None), strict=True):
        rollout.judgement = None if verdict is None else Score(kind="value", value=verdict)
    settled(found, "min_reward", judged=True)
    assert [r.total for r in found.members] == pytest.approx([0.8, 0.9, 0.8])


def test_a_verdict_that_failed_is_no_number() -> None:
    found = group(MISSING, MISSING)
    found.dropped = "judge failed: busy"
    for rollout in found.members:
        rollout.judgement = Score(kind="error", explanation="busy")
    settled(found, judged=True)
    assert [r.total for r in found.members] == [None, None]
    assert Losses.of([found], "drop").unscored == 2


@pytest.mark.parametrize(("drop", "dropped"), [(True, DEGENERATE), (False, "")])
def test_groups_that_the_judge_scored_identically(drop: bool, dropped: str) -> None:
    found = group(MISSING, MISSING)
    for rollout in found.members:
        rollout.judgement = Score(kind="value", value=0.5)
    settled(found, judged=True, drop=drop)
    assert found.dropped == dropped
    assert advantages(found) == [[0.0], [0.0]]


def test_steps_that_tell_members_apart_are_a_signal() -> None:
    found = group(MISSING, MISSING, steps={0: [1.0]})
    for rollout in found.members:
        rollout.judgement = Score(kind="value", value=0.5)
    assert settled(found, judged=True, drop=True).dropped == ""


def test_step_rewards_reach_the_call_that_earned_them() -> None:
    """Trajectory 0 earns 1 with its first call and 3 with its second. Its turns have n, n and m tokens; the
    returns of their tokens are 4, 3 and 0."""
    found = settled(group(0.0, 0.0, steps={0: [1.0, 3.0]}))
    first, second = found.members
    assert (first.total, second.total) == (4.0, 0.0)
    own = np.flatnonzero(first.trained)
    turns = np.split(own, np.flatnonzero(np.diff(own) > 1) + 1)
    assert len(turns) == 3
    sizes = [len(turn) for turn in turns]
    mean = (4 * sizes[0] + 3 * sizes[1]) / sum(sizes)
    assert first.advantage is not None
    for turn, returns in zip(turns, (4.0, 3.0, 0.0), strict=True):
        assert first.advantage[turn] == pytest.approx(2.0 + returns - mean)
    # A step starts right behind the tokens of its call, its stop token included.
    assert [start for start, _ in first.step_rewards] == [turn[-1] + 1 for turn in turns[:2]]
    assert advantages(found)[1] == [-2.0]
    assert first.advantage[own].sum() == pytest.approx(2.0 * len(own))


def test_equal_totals_with_steps_still_teach_when_they_came() -> None:
    found = settled(group(0.0, 1.0, steps={0: [1.0]}))
    assert [r.total for r in found.members] == [1.0, 1.0]
    assert found.dropped == ""
    values = advantages(found)
    assert len(values[0]) == 2
    assert values[0][0] > 0 > values[0][1]
    assert values[1] == [0.0]


def test_two_calls_of_a_turn_share_what_they_earn() -> None:
    turn = SAY + SAY
    steps = iter([1.0, 2.0])
    faults = {"say": lambda: StepResult(observation="", reward=next(steps))}
    one = play(Speaker({0: [turn, END]}), Echoes(lambda n: faults))[0]
    assert len({start for start, _ in one.step_rewards}) == 1
    assert one.reward.value == 3.0


def test_step_rewards_alone_are_the_reward() -> None:
    found = group("steps", "steps", steps={0: [0.25, 0.5]})
    assert found.members[0].reward == Score(kind="value", value=0.75, explanation="sum of step rewards")
    assert found.members[1].reward.kind == "missing"


def test_hooks_that_break_totals() -> None:
    found = group(1.0, 0.0)
    take_totals(found)
    found.members[0].total = None
    with pytest.raises(RolloutError, match="a hook took a total away"):
        take_advantages(found, judged=False, drop_degenerate=False)
    found.members[0].total = float("nan")
    with pytest.raises(RolloutError, match="totals are finite numbers"):
        take_advantages(found, judged=False, drop_degenerate=False)


def test_rollouts_hold_what_was_played() -> None:
    one, cut = group(1.0, "turns").members
    assert isinstance(one, Rollout)
    assert (one.id, one.finish, cut.finish) == ("1.0.0", "stop", "length")
    assert one.completion == END
    assert one.metrics["turns"] == 1
    assert one.trained_tokens == int(one.trained.sum())
    assert (one.logp[one.trained] == -1.0).all()
