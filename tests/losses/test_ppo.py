"""PPO by hand and by finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given

from retrograd.testing.losses import check_policy_loss
from retrograd_hookspecs import LossBatch, PolicyObjective
from retrograd_plugins.losses.ppo import ppo

from .support import away_from_kinks, batches, clipped_objective, differences, moved, naive, policy_batch

OBJECTIVE = PolicyObjective(clip_low=0.2, clip_high=0.2, kl_coefficient=0.5)


def test_by_hand() -> None:
    # −N·∂L/∂log π = A·r·1[not clipped] + k·(1 − r), with k = 0.5, ε = 0.2, N = 2:
    #  r = 1,   A =  1:  1        + 0          =  1
    #  r = 2,   A =  1:  clipped  + 0.5·(−1)   = −0.5
    #  r = 2,   A = −1: −2        + 0.5·(−1)   = −2.5
    #  r = 1/2, A = −1:  clipped  + 0.5·(1/2)  =  0.25
    # L·N = −(1 + 1.2 − 2 − 0.8) + 0.5·(0 + 2·(1 − ln 2) + (−1/2 + ln 2)) = 0.6 + 0.5·(1.5 − ln 2)
    result = ppo(policy_batch([1, 2, 2, 0.5], [1, 1, -1, -1], normalizer=2.0, objective=OBJECTIVE))
    assert result.dlogp == pytest.approx(-np.array([1, -0.5, -2.5, 0.25]) / 2)
    assert result.value == pytest.approx((0.6 + 0.5 * (1.5 - math.log(2))) / 2)
    assert result.metrics["clipped_low"] == result.metrics["clipped_high"] == 1.0


@given(batches())
def test_equals_the_naive_formula_and_its_differences(batch: LossBatch) -> None:
    assert batch.objective is not None
    coefficient = batch.objective.kl_coefficient
    expected = naive(batch, lambda i, r: coefficient * (r - 1 - math.log(r)) - clipped_objective(batch, i, r))
    result = ppo(batch)
    assert result.value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assume(away_from_kinks(batch))
    numeric = differences(lambda logp: ppo(moved(batch, logp)).value, batch.logp)
    np.testing.assert_allclose(result.dlogp, numeric, rtol=1e-5, atol=1e-8)


def test_contract() -> None:
    check_policy_loss(ppo)
