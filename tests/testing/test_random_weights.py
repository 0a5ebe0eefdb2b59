"""Random weights in every format have the spread that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd.gguf.formats import dequantisable_formats, dequantise
from retrograd.testing.quants import random_weights


@pytest.mark.parametrize("name", dequantisable_formats())
@pytest.mark.parametrize("deviation", [0.05, 0.5])
def test_mean_and_deviation(name: str, deviation: float) -> None:
    values = dequantise(random_weights(np.random.default_rng(1), 32, 1024, name, deviation), name)
    assert values.shape == (32, 1024)
    assert np.isfinite(values).all()
    # Ternary formats round most values to zero or to the largest, which widens the spread.
    ternary = name in ("TQ1_0", "TQ2_0")
    assert values.std() == pytest.approx(deviation, rel=0.6 if ternary else 0.08)
    assert abs(values.mean()) < 0.15 * deviation
