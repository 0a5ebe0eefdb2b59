"""Advantages and shaped rewards by hand."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.advantages import gae, group_advantages, intermediate_returns, overlong_penalty, whiten
from retrograd_hookspecs import TrainingError

finite = st.floats(-1e3, 1e3)


def test_group_mean() -> None:
    # Mean of 3, 0, 0, 1 is 1.
    assert group_advantages([3.0, 0.0, 0.0, 1.0]).tolist() == [2.0, -1.0, -1.0, 0.0]


def test_leave_one_out() -> None:
    # 3 less the mean of 0, 0, 1; 0 less the mean of 3, 0, 1; 1 less the mean of 3, 0, 0.
    expected = [3 - 1 / 3, -4 / 3, -4 / 3, 0.0]
    assert group_advantages([3.0, 0.0, 0.0, 1.0], "leave_one_out") == pytest.approx(expected)


@given(st.lists(finite, min_size=2, max_size=16))
def test_leave_one_out_is_what_it_says(rewards: list[float]) -> None:
    naive = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(np.array(naive), abs=1e-9)
    assert group_advantages(rewards).sum() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_give_exact_zeros(baseline: str) -> None:
    # The mean of three 0.1 is not 0.1 in floating point.
    assert group_advantages([0.1] * 3, baseline).tolist() == [0.0] * 3  # type: ignore[arg-type]


def test_group_errors() -> None:
    with pytest.raises(TrainingError, match=r"rewards must be finite: entry 1 is nan"):
        group_advantages([0.0, math.nan])
    with pytest.raises(TrainingError, match="holds no rewards"):
        group_advantages([])
    with pytest.raises(TrainingError, match="needs two answers or more"):
        group_advantages([1.0], "leave_one_out")
    assert group_advantages([1.0]).tolist() == [0.0]


def test_whiten() -> None:
    # 1, 3, 5: mean 3, variance 8/3.
    assert whiten([1.0, 3.0, 5.0]) == pytest.approx(np.array([-2, 0, 2]) / math.sqrt(8 / 3), rel=1e-7)


def test_whiten_masked() -> None:
    values = np.array([[1.0, 3.0], [99.0, 5.0]])
    mask = np.array([[True, True], [False, True]])
    edge = 2 / math.sqrt(8 / 3)
    assert whiten(values, mask) == pytest.approx(np.array([[-edge, 0], [0, edge]]), rel=1e-7)
    values[1, 0] = math.nan  # what is masked is not looked at
    assert whiten(values, mask)[1, 0] == 0.0


def test_whiten_of_equals_and_of_nothing() -> None:
    assert whiten([0.1, 0.1, 0.1]).tolist() == [0.0] * 3
    assert whiten([]).tolist() == []
    with pytest.raises(TrainingError, match="values must be finite"):
        whiten([math.inf, 1.0])


def test_gae_by_hand() -> None:
    # γ = 1/2, λ = 1/2, rewards 0, 0, 8, values 2, 4, 4:
    # δ = 0 + 2 − 2, 0 + 2 − 4, 8 − 4 = 0, −2, 4;  A_2 = 4, A_1 = −2 + 4/4 = −1, A_0 = 0 − 1/4.
    advantages, targets = gae([0.0, 0.0, 8.0], [2.0, 4.0, 4.0], gamma=0.5, lam=0.5)
    assert advantages.tolist() == [-0.25, -1.0, 4.0]
    assert targets.tolist() == [1.75, 3.0, 8.0]


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=12), st.floats(0, 1))
def test_gae_limits(pairs: list[tuple[float, float]], gamma: float) -> None:
    """λ = 1 is the return less the value; λ = 0 the one-step error."""
    rewards, values = (np.array(column) for column in zip(*pairs, strict=True))
    returns = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    advantages, targets = gae(rewards, values, gamma=gamma, lam=1.0)
    assert advantages == pytest.approx(np.array(returns) - values, abs=1e-8)
    assert targets == pytest.approx(np.array(returns), abs=1e-8)
    following = [*values[1:], 0.0]
    assert gae(rewards, values, gamma=gamma, lam=0.0)[0] == pytest.approx(
        rewards + gamma * np.array(following) - values, abs=1e-9
    )


def test_gae_errors() -> None:
    with pytest.raises(TrainingError, match="differ in shape"):
        gae([1.0], [1.0, 2.0], gamma=1.0, lam=1.0)
    with pytest.raises(TrainingError, match="values must be finite"):
        gae([1.0], [math.nan], gamma=1.0, lam=1.0)
    assert [a.size for a in gae([], [], gamma=1.0, lam=1.0)] == [0, 0]


def test_overlong_penalty() -> None:
    # Budget 100, buffer 20, largest penalty 0.5: 0 up to 80, −0.25 at 90, −0.5 at 100 and beyond.
    penalty = overlong_penalty([0, 80, 81, 90, 100, 120], budget=100, buffer_tokens=20, max_penalty=0.5)
    assert penalty == pytest.approx([0, 0, -0.025, -0.25, -0.5, -0.5])
    assert not np.signbit(penalty[0])
    whole = overlong_penalty([5], budget=10, buffer_tokens=10, max_penalty=1.0)
    assert whole.tolist() == [-0.5]
    for buffer in (0, 101):
        with pytest.raises(TrainingError, match="from 1 to the budget"):
            overlong_penalty([1], budget=100, buffer_tokens=buffer, max_penalty=1.0)


def test_intermediate_returns() -> None:
    # Steps start at tokens 4, 10 and 15 with rewards 1, 2 and −0.5.
    # Tokens 3 and 4 see all: 2.5; 8 sees the last two: 1.5; 12 sees −0.5; 20 sees nothing. Mean 6/5 = 1.2.
    returns = intermediate_returns([1.0, 2.0, -0.5], np.array([4, 10, 15]), np.array([3, 4, 8, 12, 20]))
    assert returns == pytest.approx([1.3, 1.3, 0.3, -1.7, -1.2])
    shuffled = intermediate_returns([2.0, -0.5, 1.0], np.array([10, 15, 4]), np.array([3, 4, 8, 12, 20]))
    assert shuffled.tolist() == returns.tolist()


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 30)), max_size=6),
    st.lists(st.integers(0, 30), min_size=1, max_size=20, unique=True),
)
def test_intermediate_returns_are_what_they_say(steps: list[tuple[float, int]], positions: list[int]) -> None:
    naive = np.array([math.fsum(r for r, first in steps if first >= t) for t in positions])
    result = intermediate_returns(
        [r for r, _ in steps], np.array([s for _, s in steps], np.int64), np.array(positions)
    )
    assert result == pytest.approx(naive - naive.mean(), abs=1e-9)


def test_intermediate_returns_without_steps_or_tokens() -> None:
    none = np.zeros(0, np.int64)
    assert intermediate_returns([], none, np.array([1, 2])).tolist() == [0.0, 0.0]
    assert intermediate_returns([1.0], np.array([3]), none).tolist() == []
    # A single step that all tokens precede: nothing to tell them apart.
    assert intermediate_returns([0.1], np.array([9]), np.array([1, 2, 3])).tolist() == [0.0] * 3
    with pytest.raises(TrainingError, match="2 step rewards have 1 starts"):
        intermediate_returns([1.0, 2.0], np.array([1]), np.array([1]))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_large_rewards_keep_their_differences(baseline: Literal["mean", "leave_one_out"]) -> None:
    advantages = group_advantages([1.5e308, 1.5e308, 1.5e308], baseline)
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    scale = 1.0 if baseline == "mean" else 2.0
    assert group_advantages([1e12, 1e12 + 1.0], baseline) == pytest.approx([-0.5 * scale, 0.5 * scale])


def test_rewards_too_far_apart() -> None:
    with pytest.raises(TrainingError, match=r"reach from -1e\+308 to 1e\+308"):
        group_advantages([1e308, -1e308])
