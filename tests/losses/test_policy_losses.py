"""The parts of losses of rewards: duals, ratios, errors, and what is logged."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import attrs
import numpy as np
import pytest

from retrograd.policy_losses import (
    Dual,
    PolicyTokens,
    clip,
    clip_counts,
    clipped_surrogate,
    exp,
    k3,
    minimum,
    policy_means,
    reference_penalty,
    stop_gradient,
)
from retrograd.testing.losses import check_policy_loss
from retrograd_hookspecs import Loss, LossBatch, LossResult, PolicyObjective, TrainingError
from retrograd_plugins.losses.grpo import grpo

from .support import policy_batch, sapo

A = np.array([2.0, -3.0, 0.5])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + x * x,
        lambda x: A * x - x * A + 1.0 - x,
        lambda x: 2.0 - x - 3.0,
        lambda x: exp(x) * x,
        lambda x: k3(1.0 - x),
        lambda x: minimum(x * A, clip(x, -0.5, 0.7) * A),
        lambda x: A + x * stop_gradient(x) * 0.0 + (-x),
        lambda x: x.chain(np.sin(x.value), np.cos(x.value)),
    ],
)
def test_duals_differentiate(function: Callable[[Dual], Dual]) -> None:
    at, step = np.array([0.3, -1.2, 0.9]), 1e-6
    one = np.ones(3)
    result = function(Dual(at, one))
    numeric = function(Dual(at + step, one)).value - function(Dual(at - step, one)).value
    np.testing.assert_allclose(result.slope, numeric / (2 * step), rtol=1e-8, atol=1e-9)


def test_minimum_of_equals_is_the_first() -> None:
    # Within the clip range both are equal, and the gradient is that of the ratio.
    first, second = Dual(np.ones(1), np.array([5.0])), Dual(np.ones(1), np.array([7.0]))
    assert minimum(first, second).slope.tolist() == [5.0]


def test_the_ends_of_the_clip_range_still_learn() -> None:
    x = Dual(np.array([0.5, 1.5, 1.5000001]), np.ones(3))
    assert clip(x, 0.5, 1.5).slope.tolist() == [1.0, 1.0, 0.0]


def test_k3_by_hand() -> None:
    # x = ln 2: 2 − 1 − ln 2, slope 2 − 1; x = 0: 0 and 0.
    result = k3(Dual(np.array([math.log(2), 0.0]), np.ones(2)))
    assert result.value == pytest.approx([1 - math.log(2), 0.0])
    assert result.slope == pytest.approx([1.0, 0.0])


def test_no_objective() -> None:
    batch = attrs.evolve(policy_batch([1.0], [1.0]), objective=None)
    with pytest.raises(TrainingError, match=r"grpo: no clip range.*learn from rewards"):
        grpo(batch)


@pytest.mark.parametrize("normalizer", [0.0, -1.0, math.nan, math.inf])
def test_normalizer(normalizer: float) -> None:
    with pytest.raises(TrainingError, match=r"grpo: the loss is divided by .* holds no answer"):
        grpo(policy_batch([1.0], [1.0], normalizer=normalizer))


@pytest.mark.parametrize("name", ["old_logp", "advantage"])
def test_missing_arrays(name: str) -> None:
    batch = policy_batch([1.0], [1.0])
    extra = {key: value for key, value in batch.extra.items() if key != name}
    with pytest.raises(TrainingError, match=f"grpo: the algorithm gives no '{name}', which this loss needs"):
        grpo(attrs.evolve(batch, extra=extra))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_arrays_that_are_not_finite(bad: float) -> None:
    batch = policy_batch([1.0, 1.0, 1.0], [1.0, bad, bad])
    with pytest.raises(TrainingError, match=r"grpo: 'advantage' is (nan|inf) at token 1 .*; 2 of 3 values"):
        grpo(batch)
    with pytest.raises(TrainingError, match="grpo: 'logp' is nan at token 0"):
        grpo(attrs.evolve(batch, logp=np.array([math.nan, 0.0, 0.0])))


def test_a_ratio_that_overflows_is_reported() -> None:
    batch = policy_batch([1.0, 1.0], [1.0, 1.0], old_logp=[-0.5, -800.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TrainingError, match=r"not finite for 1 of 2 tokens .*rose by 799\.3 nats"):
            grpo(batch)


def test_a_penalty_that_overflows_is_reported() -> None:
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, kl_coefficient=0.1)
    batch = policy_batch([1.0], [1.0], objective=objective, old_logp=[-800.0], ref_logp=[-1.0])
    with pytest.raises(TrainingError, match="the loss of 1 of 1 tokens is not finite"):
        grpo(attrs.evolve(batch, logp=np.array([-800.0])))


def test_large_ratios_are_exact() -> None:
    # e^100 and a negative advantage: nothing is clamped.
    batch = policy_batch([1.0], [-1.0])
    batch = attrs.evolve(batch, extra={**batch.extra, "old_logp": batch.logp - 100.0})
    assert grpo(batch).dlogp == pytest.approx([math.exp(100)], rel=1e-13)


SEQUENCE = PolicyObjective(clip_low=0.2, clip_high=0.3, level="sequence")


def test_a_cut_sequence_is_refused_without_its_mean() -> None:
    batch = policy_batch([1, 1, 1], [1, 1, 1], lengths=[1, 2], objective=SEQUENCE)
    part = attrs.evolve(
        batch,
        **{name: getattr(batch, name)[:2] for name in ("logp", "weight", "sequence", "position")},
        extra={name: array[:2] for name, array in batch.extra.items()},
    )
    with pytest.raises(TrainingError, match="a pass holds 1 of the 2 trained tokens of sequence 1"):
        grpo(part)
    extra = {name: array for name, array in batch.extra.items() if name != "sequence_tokens"}
    with pytest.raises(TrainingError, match="no 'sequence_tokens'"):
        grpo(attrs.evolve(batch, extra=extra))


def test_given_mean_of_a_sequence_is_used() -> None:
    batch = policy_batch([1.0], [1.0], objective=SEQUENCE, sequence_log_ratio=[math.log(1.25)])
    result = grpo(batch)
    assert result.value == pytest.approx(-1.25)
    assert result.dlogp == pytest.approx([-1.25])


def test_masked_tokens_are_in_no_sum() -> None:
    batch = policy_batch([1.5, 1.5], [1.0, 1.0])
    result = grpo(attrs.evolve(batch, weight=np.array([0.0, 1.0])))
    assert result.dlogp.tolist() == [0.0, 0.0]
    assert (result.metrics["tokens"], result.metrics["clipped_high"]) == (1.0, 1.0)
    assert result.metrics["ratio"] == pytest.approx(1.5)


def test_an_empty_pass() -> None:
    result = grpo(policy_batch([], [], lengths=[0]))
    assert (result.value, result.dlogp.size, result.metrics["tokens"]) == (0.0, 0, 0.0)


def test_what_is_logged() -> None:
    batch = policy_batch([1.5, 1.0], [1.0, -2.0], ref_logp=np.log([0.75, 0.5]))
    means = policy_means(grpo(batch).metrics | {"importance_weight": 3.0})
    assert means == pytest.approx(
        {
            "policy/ratio_mean": 1.25,
            "policy/approx_kl": (0.5 - math.log(1.5)) / 2,
            "policy/kl_reference": 0.0,
            "policy/advantage_abs": 1.5,
            "policy/clip_fraction_low": 0.0,
            "policy/clip_fraction_high": 0.5,
            "policy/importance_weight": 1.5,
        }
    )
    assert policy_means({"tokens": 0.0, "ratio": 0.0}) == {}


def test_contract_suite_finds_wrong_losses() -> None:
    def wrong(term: Callable[[PolicyTokens], Dual]) -> Loss:
        def loss(batch: LossBatch) -> LossResult:
            return PolicyTokens.of(batch, "wrong").result(term(PolicyTokens.of(batch, "wrong")))

        return loss

    def unscaled(batch: LossBatch) -> LossResult:
        right = grpo(batch)
        return LossResult(value=2 * right.value, dlogp=2 * right.dlogp, metrics=right.metrics)

    def mean_of_the_pass(batch: LossBatch) -> LossResult:
        return grpo(attrs.evolve(batch, normalizer=float(batch.logp.size)))

    def forgets_the_objective(batch: LossBatch) -> LossResult:
        return grpo(attrs.evolve(batch, objective=batch.objective or SEQUENCE))

    def silent(batch: LossBatch) -> LossResult:
        if "old_logp" not in batch.extra:
            batch = attrs.evolve(batch, extra={**batch.extra, "old_logp": batch.logp})
        return grpo(batch)

    def masked_tokens_count(batch: LossBatch) -> LossResult:
        right = grpo(batch)
        return attrs.evolve(right, metrics={"tokens": float(batch.logp.size)})

    held = wrong(lambda t: -(stop_gradient(t.ratio) * t.advantage * t.logp))
    for loss, message in (
        (held, "differences give"),
        (unscaled, "ratios of 1"),
        (mean_of_the_pass, "cut into passes"),
        (forgets_the_objective, "without an objective"),
        (silent, "without 'old_logp'"),
        (masked_tokens_count, "not a sum over passes"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_policy_loss(loss)
    check_policy_loss(held, hold_ratio=True)


def test_parts_compose_to_grpo() -> None:
    """The example of the module's docstring."""

    def composed(batch: LossBatch) -> LossResult:
        tokens = PolicyTokens.of(batch, "grpo")
        ratio, advantage = tokens.ratio, tokens.advantage
        surrogate = minimum(ratio * advantage, clip(ratio, tokens.lowest, tokens.highest) * advantage)
        assert surrogate.value.tolist() == clipped_surrogate(tokens).value.tolist()
        return tokens.result(reference_penalty(tokens) - surrogate, clip_counts(tokens))

    check_policy_loss(composed)


def test_sapo_by_hand() -> None:
    # τ = 2 for A > 0, 4 for A < 0; σ(0) = 1/2, so at r = 1 the gate is 4/τ·1/2 = 1 (τ = 4: 1/2), and its
    # slope 4·(1/2)·(1/2) = 1. At r = 1.5, τ = 2: σ(1), gradient 4·σ(1)·σ(−1)·r·A.
    sigma = 1 / (1 + math.exp(-1))
    result = sapo(tau_positive=2.0, tau_negative=4.0)(policy_batch([1, 1, 1.5], [3, -1, 1]))
    assert result.value == pytest.approx(-(3 * 1.0 - 0.5 + 2 * sigma))
    assert result.dlogp == pytest.approx([-3, 1, -4 * sigma * (1 - sigma) * 1.5])


def test_sapo_contract() -> None:
    check_policy_loss(sapo())
