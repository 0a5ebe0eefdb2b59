"""Cross-entropy against a case worked by hand, and the contract of losses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from retrograd.testing.losses import check_loss
from retrograd_hookspecs import BuildContext, LossBatch, LossResult, NoConfig, TrainingError
from retrograd_plugins.losses.cross_entropy import cross_entropy, retrograd_losses


def batch(probabilities: list[float], weight: list[float], normalizer: float) -> LossBatch:
    return LossBatch(
        logp=np.log(np.array(probabilities)),
        weight=np.array(weight),
        sequence=np.zeros(len(weight), np.int64),
        position=np.arange(1, len(weight) + 1),
        normalizer=normalizer,
    )


def test_by_hand() -> None:
    # p = 1/2, 1/4, 1/8; weights 1, 1, 2; N = 4: (ln 2 + 2 ln 2 + 2·3 ln 2) / 4 = 9/4 · ln 2.
    result = cross_entropy(batch([0.5, 0.25, 0.125], [1.0, 1.0, 2.0], 4.0))
    assert result.value == pytest.approx(9 / 4 * math.log(2), rel=1e-15)
    assert result.dlogp.tolist() == [-0.25, -0.25, -0.5]
    assert result.metrics["nll"] == pytest.approx(9 * math.log(2), rel=1e-15)
    assert result.metrics["weight"] == 4.0


def test_contract() -> None:
    check_loss(cross_entropy)


def test_sum_is_exact_where_float32_would_lose_it() -> None:
    n = 200_000
    many = LossBatch(
        logp=np.full(n, -0.1, np.float32),
        weight=np.ones(n, np.float32),
        sequence=np.zeros(n, np.int64),
        position=np.arange(1, n + 1),
        normalizer=float(n),
    )
    assert cross_entropy(many).value == pytest.approx(float(np.float32(0.1)), rel=1e-12)


@pytest.mark.parametrize("normalizer", [0.0, -1.0, math.nan, math.inf])
def test_step_without_trained_tokens_is_refused(normalizer: float) -> None:
    with pytest.raises(TrainingError, match="no trained token"):
        cross_entropy(batch([0.5], [1.0], normalizer))


def test_component() -> None:
    (component,) = retrograd_losses()
    loss = component.build(NoConfig(), BuildContext(config=None, base_dir=Path()))
    assert isinstance(loss(batch([0.5], [1.0], 1.0)), LossResult)


def test_contract_suite_finds_wrong_losses() -> None:
    def wrong_derivative(b: LossBatch) -> LossResult:
        right = cross_entropy(b)
        return LossResult(value=right.value, dlogp=right.dlogp * 1.01)

    def mean_of_the_pass(b: LossBatch) -> LossResult:
        return LossResult(
            value=-float(np.mean(b.weight * b.logp)), dlogp=(-b.weight / b.logp.size).astype(b.logp.dtype)
        )

    def in_place(b: LossBatch) -> LossResult:
        b.logp[0] -= 1.0
        return cross_entropy(b)

    def wide(b: LossBatch) -> LossResult:
        right = cross_entropy(b)
        return LossResult(value=right.value, dlogp=right.dlogp.astype(np.float64))

    for wrong, message in (
        (wrong_derivative, "differences give"),
        (mean_of_the_pass, "cut into passes"),
        (in_place, "changed its input"),
        (wide, "float32"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_loss(wrong)
