"""Logits under the masks of constraints, and what a mask takes away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]


def masked_rows(logits: npt.NDArray[Any], masks: Mapping[int, Mask]) -> npt.NDArray[Any]:
    """Logits (n, V) with minus infinity where a row's mask (V,) is False; the same array without masks."""
    if not masks:
        return logits
    rows = logits.copy()
    for row, mask in masks.items():
        rows[row, ~mask] = -np.inf
    return rows


def unmasked(
    logits: npt.NDArray[Any], mask: Mask, token: int, temperature: float = 1.0
) -> tuple[float, float]:
    """The token's log-probability in softmax(logits / temperature), and the probability there of all tokens
    that the mask forbids. Temperature 0 counts as 1. logits and mask (V,)."""
    z = np.asarray(logits, np.float64) / (temperature or 1.0)
    z -= z.max()
    weights = np.exp(z)
    total = float(weights.sum())
    return float(z[token]) - float(np.log(total)), float(weights[~mask].sum()) / total
