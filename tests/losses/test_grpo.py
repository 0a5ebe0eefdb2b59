"""GRPO and GSPO by hand, against a naive implementation, and by finite differences."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from retrograd.advantages import group_advantages
from retrograd.testing.losses import check_policy_loss
from retrograd_hookspecs import LossBatch, PolicyObjective, TrainingError
from retrograd_plugins.losses.grpo import grpo

from .support import (
    away_from_kinks,
    batches,
    clipped_objective,
    differences,
    moved,
    naive,
    policy_batch,
    reference_term,
)


def test_by_hand() -> None:
    # ε = 0.2 / 0.3, N = 8 (two answers × four tokens).
    #   r    A    r·A   clip(r)·A  min    gradient of −min: −r·A, 0 where the clip binds
    #  1.0   1    1.0     1.0      1.0    −1.0
    #  1.5   1    1.5     1.3      1.3     0     clipped above
    #  0.5   1    0.5     0.8      0.5    −0.5   below, but a good token: it may come back
    #  1.5  −1   −1.5    −1.3     −1.5     1.5   above, but a bad token
    #  0.5  −1   −0.5    −0.8     −0.8     0     clipped below
    # Σ min = 1.0 + 1.3 + 0.5 − 1.5 − 0.8 = 0.5
    result = grpo(policy_batch([1, 1.5, 0.5, 1.5, 0.5], [1, 1, 1, -1, -1], normalizer=8.0))
    assert result.value == pytest.approx(-0.5 / 8, rel=1e-14)
    assert result.dlogp == pytest.approx(np.array([-1.0, 0.0, -0.5, 1.5, 0.0]) / 8, rel=1e-14)
    assert result.metrics["tokens"] == 5.0
    assert result.metrics["ratio"] == pytest.approx(5.0)
    assert result.metrics["clipped_low"] == 1.0
    assert result.metrics["clipped_high"] == 1.0
    assert result.metrics["advantage_abs"] == 5.0
    # (r − 1) − ln r: 0, 0.5 − ln 1.5, −0.5 + ln 2, and the last two once more.
    assert result.metrics["kl_old"] == pytest.approx(2 * (0.5 - math.log(1.5)) + 2 * (-0.5 + math.log(2)))


def test_reference_by_hand() -> None:
    # π = 1/2 (ratio 1), π_ref = 1/4, β = 0.1: k3 = 1/2 − 1 + ln 2, derivative 1 − π_ref/π = 1/2.
    # A = 2: L = 0.1·(ln 2 − 1/2) − 2, ∂L/∂log π = 0.05 − 2.
    objective = PolicyObjective(clip_low=0.2, clip_high=0.3, kl_coefficient=0.1)
    result = grpo(policy_batch([1.0], [2.0], objective=objective, ref_logp=[math.log(0.25)]))
    assert result.value == pytest.approx(0.1 * (math.log(2) - 0.5) - 2)
    assert result.dlogp == pytest.approx([0.05 - 2])
    assert result.metrics["kl_reference"] == pytest.approx(math.log(2) - 0.5)


def test_sequences_by_hand() -> None:
    # GSPO. First answer: ratios 4, 1, so s = √4 = 2 for both tokens; A = −1: s·A = −2 < 1.3·A, not clipped.
    # Second: ratios 1/2, 1/2, s = 1/2, A = −1: clipped below at 0.8, no gradient. Third: s = 1, A = 3.
    # ∂L/∂log π_u = −(s/2)·(A + A)/N = −s·A/N: 2, 2, 0, 0, −3, with N = 10.
    objective = PolicyObjective(clip_low=0.2, clip_high=0.3, level="sequence")
    batch = policy_batch(
        [4, 1, 0.5, 0.5, 1], [-1, -1, -1, -1, 3], lengths=[2, 2, 1], normalizer=10.0, objective=objective
    )
    result = grpo(batch)
    assert result.value == pytest.approx((2 + 2 + 0.8 + 0.8 - 3) / 10)
    assert result.dlogp == pytest.approx(np.array([2, 2, 0, 0, -3]) / 10, abs=1e-15)
    assert result.metrics["clipped_low"] == 2.0
    assert result.metrics["ratio"] == pytest.approx(2 + 2 + 0.5 + 0.5 + 1)


def test_each_token_keeps_its_own_advantage() -> None:
    # s = 1 and advantages ±1 that are centred within the trajectory: the derivative of s itself would be
    # the mean of the advantages, 0, and the step rewards would teach nothing.
    objective = PolicyObjective(clip_low=0.2, clip_high=0.3, level="sequence")
    result = grpo(policy_batch([1, 1], [1, -1], objective=objective))
    assert result.dlogp.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_first_step_is_the_plain_policy_gradient(level: str) -> None:
    advantages = np.repeat(group_advantages([1.0, 0.0, 0.0, 1.0]), 3)
    objective = PolicyObjective(clip_low=0.2, clip_high=0.28, level=level)  # type: ignore[arg-type]
    batch = policy_batch([1.0] * 12, advantages, lengths=[3] * 4, normalizer=64.0, objective=objective)
    result = grpo(batch)
    assert result.dlogp.tolist() == (-advantages / 64).tolist()
    assert result.value == pytest.approx(0.0, abs=1e-16)
    assert result.metrics["clipped_low"] == result.metrics["clipped_high"] == 0.0


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(st.data())
def test_equals_the_naive_formula(level: str, data: st.DataObject) -> None:
    batch = data.draw(batches(level=level))
    expected = naive(batch, lambda i, r: reference_term(batch, i) - clipped_objective(batch, i, r))
    assert grpo(batch).value == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(batches())
def test_differences_by_token(batch: LossBatch) -> None:
    assume(away_from_kinks(batch))
    numeric = differences(lambda logp: grpo(moved(batch, logp)).value, batch.logp)
    np.testing.assert_allclose(grpo(batch).dlogp, numeric, rtol=1e-5, atol=1e-8)


@given(batches(level="sequence", own_advantages=False))
def test_differences_by_sequence(batch: LossBatch) -> None:
    """One advantage a sequence: the true derivative of GSPO's s_i."""
    assume(away_from_kinks(batch))
    numeric = differences(lambda logp: grpo(moved(batch, logp)).value, batch.logp)
    np.testing.assert_allclose(grpo(batch).dlogp, numeric, rtol=1e-5, atol=1e-8)


@given(batches(level="sequence"))
def test_differences_of_gspo_token(batch: LossBatch) -> None:
    """GSPO-token, equation 14: s_i held, times π over π held, which is 1 where the derivative is taken."""
    assume(away_from_kinks(batch))

    def value(logp: np.ndarray) -> float:
        def term(i: int, held: float) -> float:
            ratio = held * math.exp(logp[i]) / math.exp(batch.logp[i])
            return reference_term(moved(batch, logp), i) - clipped_objective(batch, i, ratio)

        return naive(batch, term)

    np.testing.assert_allclose(grpo(batch).dlogp, differences(value, batch.logp), rtol=1e-5, atol=1e-8)


@given(batches(level="sequence"), st.integers(0, 2**32 - 1))
def test_parts_of_sequences_add_up(batch: LossBatch, seed: int) -> None:
    """Passes that cut sequences anywhere give the derivative and the sums of the whole."""
    whole = grpo(batch)
    drift = batch.logp - batch.extra["old_logp"]
    mean = np.array([drift[batch.sequence == s].mean() for s in batch.sequence])
    extra = {n: a for n, a in batch.extra.items() if n != "sequence_tokens"} | {"sequence_log_ratio": mean}
    first = np.random.default_rng(seed).random(batch.logp.size) < 0.5
    parts = []
    dlogp = np.empty_like(batch.logp)
    for mask in (first, ~first):
        part = attrs.evolve(
            batch,
            **{n: getattr(batch, n)[mask] for n in ("logp", "weight", "sequence", "position")},
            extra={name: array[mask] for name, array in extra.items()},
        )
        parts.append(grpo(part))
        dlogp[mask] = parts[-1].dlogp
    np.testing.assert_allclose(dlogp, whole.dlogp, rtol=1e-12)
    assert sum(part.value for part in parts) == pytest.approx(whole.value, rel=1e-12, abs=1e-14)
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name] for part in parts) == pytest.approx(value, rel=1e-12, abs=1e-12)


def test_contract() -> None:
    check_policy_loss(grpo)


def test_penalty_needs_the_reference() -> None:
    objective = PolicyObjective(clip_low=0.2, clip_high=0.3, kl_coefficient=0.1)
    with pytest.raises(
        TrainingError, match=r"grpo: the algorithm gives no 'ref_logp'.*given: advantage, old_logp"
    ):
        grpo(policy_batch([1.0], [1.0], objective=objective))
