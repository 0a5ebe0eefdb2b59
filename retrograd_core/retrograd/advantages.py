"""Advantages and shaped rewards: pure functions of arrays, in float64.

Rewards are given: a reward that is missing or failed is the caller's to leave out, and one that is not
finite is an error here.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import TrainingError

Array = npt.NDArray[np.float64]
Numbers = npt.ArrayLike

_LARGEST = 1e38
"""Losses are computed in float32, whose largest number is 3.4e38."""

_EPSILON = 1e-8
"""Added to a standard deviation before dividing by it."""


def group_advantages(
    rewards: Numbers, baseline: Literal["mean", "leave_one_out"] = "mean"
) -> npt.NDArray[np.float64]:
    """Advantages (n,) of the answers to one prompt: each reward less its baseline.

    The baseline is the mean of the group, or for "leave_one_out" the mean of the other answers, which is
    independent of the answer's own reward. Nothing is divided by a standard deviation. Equal rewards give
    exact zeros.

    Raises: `TrainingError` for a reward that is not finite, an empty group, "leave_one_out" of one, or
    rewards so far apart that their differences are no float32.

    Sources: Liu et al. 2025, Understanding R1-Zero-Like Training, section 3.2 (Dr. GRPO); Kool et al. 2019,
    Buy 4 REINFORCE Samples, Get a Baseline for Free!; Ahmadian et al. 2024, Back to Basics (RLOO).
    """
    values = _finite(rewards, "rewards")
    if values.size == 0:
        raise TrainingError("advantages: a group holds no rewards")
    check_comparable(values)
    # Centred on one of them first: the sum of large rewards would overflow or lose their differences.
    offset = values - values[0]
    centred = offset - offset.mean() if np.any(offset) else np.zeros_like(values)
    if baseline == "mean":
        return centred
    if values.size < 2:
        raise TrainingError('advantages: baseline = "leave_one_out" needs two answers or more, got 1')
    # r − (S − r)/(n − 1) = (r − S/n) · n/(n − 1)
    return centred * (values.size / (values.size - 1))


def check_comparable(rewards: Numbers) -> None:
    """Raises `TrainingError` if rewards are so far apart that their differences are no float32."""
    values = np.asarray(rewards, dtype=np.float64)
    lowest, highest = float(values.min()), float(values.max())
    if highest / 2 - lowest / 2 > _LARGEST / 2:
        raise TrainingError(
            f"advantages: rewards reach from {lowest:g} to {highest:g}; differences above {_LARGEST:g} cannot"
            " be trained on"
        )


def whiten(values: Numbers, mask: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.float64]:
    """(x − mean) / (standard deviation + 1e-8), of an array of any shape.

    `mask`, of the same shape, says which entries count; the others are 0 in the result. The deviation is
    the population's. Equal values give exact zeros.

    Raises: `TrainingError` for a value that counts and is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    counted = np.ones(array.shape, np.bool_) if mask is None else mask
    chosen = _finite(array[counted], "values")
    out = np.zeros_like(array)
    if chosen.size and not np.all(chosen == chosen[0]):
        out[counted] = (chosen - chosen.mean()) / (chosen.std() + _EPSILON)
    return out


def gae(rewards: Numbers, values: Numbers, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Generalised advantage estimates and value targets, (n,) each, of one answer that ends.

    `rewards` (n,) is what follows each token, `values` (n,) the critic's estimate before it. After the last
    token the value is 0.

    δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γ·λ·A_{t+1},  target_t = A_t + V_t

    Raises: `TrainingError` for a number that is not finite or arrays of unequal length.

    Source: Schulman et al. 2016, High-Dimensional Continuous Control Using GAE, equations 11, 12 and 16.
    """
    reward, value = _finite(rewards, "rewards"), _finite(values, "values")
    if reward.shape != value.shape or reward.ndim != 1:
        raise TrainingError(f"advantages: rewards {reward.shape} and values {value.shape} differ in shape")
    delta = reward + gamma * np.append(value[1:], 0.0)[: value.size] - value
    advantage = np.empty_like(delta)
    following = 0.0
    for t in range(delta.size - 1, -1, -1):
        following = delta[t] + gamma * lam * following
        advantage[t] = following
    return advantage, advantage + value


def overlong_penalty(
    lengths: Numbers, *, budget: int, buffer_tokens: int, max_penalty: float
) -> npt.NDArray[np.float64]:
    """What to add to the rewards of answers of these lengths in tokens: 0 or less.

    0 up to `budget − buffer_tokens`, then linear down to −`max_penalty` at `budget`, and no lower.

    Raises: `TrainingError` unless 0 < `buffer_tokens` ≤ `budget`.

    Source: Yu et al. 2025, DAPO, equation 13 (there with a penalty of 1).
    """
    if not 0 < buffer_tokens <= budget:
        raise TrainingError(
            f"overlong_penalty: buffer_tokens = {buffer_tokens} must be from 1 to the budget, {budget}"
        )
    length = np.asarray(lengths, dtype=np.float64)
    used = np.clip((length - (budget - buffer_tokens)) / buffer_tokens, 0.0, 1.0)
    return np.asarray(0.0 - max_penalty * used)


def intermediate_returns(
    step_rewards: Numbers, starts: npt.NDArray[Any], positions: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Returns (n,) of the policy's tokens of one trajectory, centred to a mean of 0.

    `step_rewards` (s,) and `starts` (s,): the reward of each step and the index of its first token, which
    comes after the tokens of the call that it answers; `positions` (n,): the indices of the policy's tokens.
    A token's return is the sum of the rewards of the steps that start at or after it: those that it could
    still bring about. (γ = 1.) It is added to the advantage of the token's trajectory.

    Raises: `TrainingError` for a reward that is not finite or arrays of unequal length.
    """
    reward = _finite(step_rewards, "step rewards")
    first, position = np.asarray(starts), np.asarray(positions)
    if reward.shape != first.shape:
        raise TrainingError(f"advantages: {reward.size} step rewards have {first.size} starts")
    if position.size == 0:
        return np.zeros(0)
    order = np.argsort(first, kind="stable")
    # remaining[i]: the sum over the steps from the i-th on, in the order of their starts.
    remaining = np.append(np.cumsum(reward[order][::-1])[::-1], 0.0)
    returns = remaining[np.searchsorted(first[order], position, side="left")]
    if np.all(returns == returns[0]):
        return np.zeros_like(returns)
    return np.asarray(returns - returns.mean())


def _finite(values: Numbers, name: str) -> Array:
    array = np.asarray(values, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(array.ravel()))
    if bad.size:
        raise TrainingError(f"advantages: {name} must be finite: entry {bad[0]} is {array.ravel()[bad[0]]}")
    return array
