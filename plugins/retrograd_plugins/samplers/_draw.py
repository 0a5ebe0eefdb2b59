"""Draws from softmax distributions without filters, one a row of logits, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from retrograd_plugins.kernels.cpu._math_common import PARALLEL, SERIAL
from retrograd_plugins.kernels.cpu._math_lanes import (
    exp_lanes,
    fill_lanes,
    load_lanes,
    load_some,
    max_lanes,
    maximum,
    store_lanes,
    sum_lanes,
)
from retrograd_plugins.kernels.cpu._simd import WIDTH

PART = 2048
"""Logits whose weights are summed in float32; the sums of parts are added in float64."""
LOWEST = np.float32(-np.inf)
ZERO = np.float32(0.0)


@njit(**SERIAL)
def _lanes(logits: Any, i: Any, end: Any) -> Any:
    """Logits [i, i + 16), minus infinity from `end` on."""
    if i + WIDTH <= end:
        return load_lanes(logits, i)
    return load_some(logits, i, end - i, LOWEST)


@njit(**SERIAL)
def _draw_row(logits: Any, inverse: Any, uniform: Any, sums: Any, weights: Any) -> Any:
    """Token, its log-probability, and the largest logit (not a number if any logit is not one).

    The weight of a token is exp((logit − largest) · inverse). Its part is found by the sums of parts, and it
    itself by the weights in its part, both added in float64 in the order of tokens.
    """
    size = logits.size
    best = fill_lanes(LOWEST)
    for i in range(0, size, WIDTH):
        best = maximum(best, _lanes(logits, np.int64(i), size))
    highest = max_lanes(best)
    top, factor = fill_lanes(highest), fill_lanes(inverse)
    total, parts = 0.0, (size + PART - 1) // PART
    for part in range(parts):
        weight_sum = fill_lanes(ZERO)
        end = min(size, (part + 1) * PART)
        for i in range(part * PART, end, WIDTH):
            weight_sum = weight_sum + exp_lanes((_lanes(logits, np.int64(i), end) - top) * factor)
        sums[part] = np.float64(sum_lanes(weight_sum))
        total += sums[part]
    if not total < np.inf:
        return 0, 0.0, np.float32(np.nan)
    wanted, before, part = uniform * total, 0.0, 0
    while part < parts - 1 and before + sums[part] <= wanted:
        before += sums[part]
        part += 1
    # Rounding may carry the number past the last weight: then the last token that has one is meant.
    while part > 0 and sums[part] == 0.0:
        part -= 1
    start, end = part * PART, min(size, (part + 1) * PART)
    token = start
    for i in range(start, end, WIDTH):
        store_lanes(weights, np.int64(0), exp_lanes((_lanes(logits, np.int64(i), end) - top) * factor))
        for lane in range(min(WIDTH, end - i)):
            weight = np.float64(weights[lane])
            if weight > 0.0:
                token = i + lane
                before += weight
                if before > wanted:
                    return token, np.log(weight / total), highest
    weight = np.float64(np.exp((logits[token] - highest) * inverse))
    return token, np.log(weight / total), highest


@njit(**PARALLEL)
def draw_rows(
    logits: Any, inverse: Any, uniform: Any, sums: Any, weights: Any, tokens: Any, logp: Any, highest: Any
) -> None:
    """logits float32 (n, V), inverse temperatures float32 (n,) and uniform numbers float64 (n,) to tokens
    int64, logp float64 and the largest logits float32, (n,). A row's results depend on that row alone."""
    for row in prange(logits.shape[0]):
        tokens[row], logp[row], highest[row] = _draw_row(
            logits[row], inverse[row], uniform[row], sums[row], weights[row]
        )


def draw(
    logits: npt.NDArray[np.float32], temperatures: npt.ArrayLike, uniform: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float32]]:
    """One token a row of logits (n, V): tokens, their log-probabilities, the largest logits, each (n,).

    `temperatures` are above 0; `uniform` are numbers from [0, 1), one a row.
    """
    count, size = logits.shape
    tokens, logp = np.empty(count, np.int64), np.empty(count, np.float64)
    highest = np.empty(count, np.float32)
    draw_rows(
        logits,
        (1.0 / np.asarray(temperatures, np.float64)).astype(np.float32),
        np.asarray(uniform, np.float64),
        np.empty((count, -(-size // PART)), np.float64),
        np.empty((count, WIDTH), np.float32),
        tokens,
        logp,
        highest,
    )
    return tokens, logp, highest
