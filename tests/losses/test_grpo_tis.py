"""The capped importance weight from the sampler to the training path."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, given

from retrograd.testing.losses import check_policy_loss
from retrograd_hookspecs import LossBatch, TrainingError
from retrograd_plugins.losses.grpo import grpo
from retrograd_plugins.losses.grpo_tis import GrpoTis, GrpoTisConfig

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

MODES: tuple[Literal["truncate", "mask"], ...] = ("truncate", "mask")


def test_by_hand() -> None:
    # π_old = 1/2; the sampler drew with 1/2, 1/8, 1, 1/3: π_old/π_sampler = 1, 4, 1/2, 1.5; the cap is 2.
    # c = 1, 2, 0.5, 1.5 (masked: 1, 0, 0.5, 1.5); r = 1, 1, 1, 1.5; A = 1, 1, −1, 1; ε_high = 0.3.
    # c·min = 1, 2, −0.5, 1.5·1.3 = 1.95; gradient −c·r·A = −1, −2, 0.5, 0 (clipped).
    sampled = np.log([1 / 2, 1 / 8, 1, 1 / 3])
    batch = policy_batch([1, 1, 1, 1.5], [1, 1, -1, 1], sampled_logp=sampled)
    result = GrpoTis(GrpoTisConfig(cap=2.0))(batch)
    assert result.value == pytest.approx(-(1 + 2 - 0.5 + 1.95))
    assert result.dlogp == pytest.approx([-1, -2, 0.5, 0])
    assert result.metrics["importance_weight"] == pytest.approx(5.0)
    assert result.metrics["importance_capped"] == 1.0
    masked = GrpoTis(GrpoTisConfig(cap=2.0, beyond_cap="mask"))(batch)
    assert masked.value == pytest.approx(-(1 - 0.5 + 1.95))
    assert masked.dlogp == pytest.approx([-1, 0, 0.5, 0])
    assert masked.metrics["importance_weight"] == pytest.approx(3.0)
    assert masked.metrics["importance_capped"] == 1.0


@pytest.mark.parametrize("mode", MODES)
@given(batch=batches())
def test_equals_the_naive_formula_and_its_differences(
    mode: Literal["truncate", "mask"], batch: LossBatch
) -> None:
    cap = 1.25
    loss = GrpoTis(GrpoTisConfig(cap=cap, beyond_cap=mode))

    def term(i: int, ratio: float) -> float:
        weight = math.exp(batch.extra["old_logp"][i] - batch.extra["sampled_logp"][i])
        if weight > cap:
            weight = 0.0 if mode == "mask" else cap
        return reference_term(batch, i) - weight * clipped_objective(batch, i, ratio)

    result = loss(batch)
    assert result.value == pytest.approx(naive(batch, term), rel=1e-9, abs=1e-12)
    assume(away_from_kinks(batch))
    numeric = differences(lambda logp: loss(moved(batch, logp)).value, batch.logp)
    np.testing.assert_allclose(result.dlogp, numeric, rtol=1e-5, atol=1e-8)


def test_a_sampler_that_agrees_changes_nothing() -> None:
    batch = policy_batch([1, 1.5, 0.5], [1, 1, -1], sampled_logp=np.log([0.5] * 3))
    expected = grpo(batch)
    for mode in MODES:
        result = GrpoTis(GrpoTisConfig(beyond_cap=mode))(batch)
        assert result.value == expected.value
        assert result.dlogp.tolist() == expected.dlogp.tolist()


def test_a_token_the_sampler_could_hardly_draw_gets_the_cap() -> None:
    """exp overflows at 710 nats; the cap holds beyond."""
    batch = policy_batch([1.0], [1.0], sampled_logp=[-800.0])
    assert GrpoTis(GrpoTisConfig(cap=2.0))(batch).dlogp.tolist() == [-2.0]
    assert GrpoTis(GrpoTisConfig(cap=2.0, beyond_cap="mask"))(batch).dlogp.tolist() == [0.0]


def test_contract() -> None:
    for mode in MODES:
        check_policy_loss(GrpoTis(GrpoTisConfig(beyond_cap=mode)))


def test_needs_the_samplers_log_probabilities() -> None:
    with pytest.raises(TrainingError, match="grpo_tis: the algorithm gives no 'sampled_logp'"):
        GrpoTis(GrpoTisConfig())(policy_batch([1.0], [1.0]))
