"""CISPO by hand and by differences with the weights held."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given

from retrograd.testing.losses import check_policy_loss
from retrograd_hookspecs import BuildContext, LossBatch
from retrograd_plugins.losses.cispo import Cispo, CispoConfig, retrograd_losses

from .support import away_from_kinks, batches, differences, moved, naive, policy_batch, reference_term

CISPO = Cispo(CispoConfig())
BOUNDED = Cispo(CispoConfig(clip_low=True))


def test_by_hand() -> None:
    # π_old = 1/2, ε_high = 0.3, N = 2: weights min(r, 1.3) = 1, 1.3, 1.3, 0.5; ∂L/∂log π = −weight·A/N.
    # GRPO would give the second token no gradient.
    batch = policy_batch([1, 2, 2, 0.5], [1, 1, -1, -1], normalizer=2.0)
    result = CISPO(batch)
    assert result.dlogp == pytest.approx(-np.array([1, 1.3, -1.3, -0.5]) / 2)
    # log π = ln 1/2, 0, 0, ln 1/4: L·N = −(1·ln 1/2 − 0.5·ln 1/4) = ln 2 − ln 2 = 0.
    assert result.value == pytest.approx(0.0, abs=1e-15)
    assert (result.metrics["clipped_low"], result.metrics["clipped_high"]) == (0.0, 2.0)
    bounded = BOUNDED(batch)
    assert bounded.dlogp == pytest.approx(-np.array([1, 1.3, -1.3, -0.8]) / 2)
    assert (bounded.metrics["clipped_low"], bounded.metrics["clipped_high"]) == (1.0, 2.0)


@pytest.mark.parametrize("loss", [CISPO, BOUNDED])
@given(batch=batches())
def test_equals_the_naive_formula_and_its_differences(loss: Cispo, batch: LossBatch) -> None:
    assert batch.objective is not None
    low = 1 - batch.objective.clip_low if loss.config.clip_low else 0.0
    high = 1 + batch.objective.clip_high

    def term(i: int, ratio: float) -> float:
        weight = high if ratio > high else low if ratio < low else ratio
        return reference_term(batch, i) - weight * batch.extra["advantage"][i] * batch.logp[i]

    result = loss(batch)
    assert result.value == pytest.approx(naive(batch, term), rel=1e-9, abs=1e-12)
    assume(away_from_kinks(batch))
    numeric = differences(lambda logp: loss(moved(batch, logp, hold_ratio=True)).value, batch.logp)
    np.testing.assert_allclose(result.dlogp, numeric, rtol=1e-5, atol=1e-8)


def test_a_large_bound_is_importance_weighted_reinforce() -> None:
    import attrs

    batch = policy_batch([0.25, 1.0, 1.75], [1.0, 1.0, -1.0])
    assert batch.objective is not None
    batch = attrs.evolve(batch, objective=attrs.evolve(batch.objective, clip_high=math.inf))
    assert CISPO(batch).dlogp == pytest.approx([-0.25, -1.0, 1.75])


def test_contract() -> None:
    check_policy_loss(CISPO, hold_ratio=True)
    check_policy_loss(BOUNDED, hold_ratio=True)


def test_component(tmp_path: object) -> None:
    (component,) = retrograd_losses()
    from pathlib import Path

    built = component.build(CispoConfig(clip_low=True), BuildContext(config=None, base_dir=Path()))
    assert built == BOUNDED
