"""Squares of the tiled backward pass of attention: 32 keys, which are rows, and 32 queries of a strip.

A square's scores and products dout·v lie behind each other; its weights and slopes are tiles among those of
the other squares of its strip.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ._attention_blocks import ONE
from ._attention_lanes import CAUSAL, SQUARE, VISIBLE, gradient_rows
from ._attention_packs import HALF, LINE, split_step, store_square, zero_square
from ._math_common import SERIAL
from ._math_lanes import fill_lanes, tanh_lanes
from ._rows_kinds import TILE_BYTES, TILE_PAIR
from ._simd import WIDTH
from ._stack_memory import lanes_at, put_lanes

STRIP = 128
"""Rows of a chunk whose weights are kept for the sums over them."""
SQUARES = STRIP // SQUARE
SQUARE_BYTES = 4 * SQUARE * SQUARE


@njit(**SERIAL)
def cap(scores: Any, table: Any, softcap: Any) -> None:
    """Cap the scores of a square, and take the slope of the cap into the products behind them."""
    for at in range(0, SQUARE_BYTES, 4 * WIDTH):
        tanh = tanh_lanes(lanes_at(scores + at) * (ONE / softcap))
        put_lanes(scores + at, tanh * softcap)
        delta = lanes_at(table + 4 * SQUARE + at % (4 * SQUARE))
        gradient = (lanes_at(scores + SQUARE_BYTES + at) - delta) * (fill_lanes(ONE) - tanh * tanh)
        put_lanes(scores + SQUARE_BYTES + at, gradient + delta)


@njit(**SERIAL)
def soften(
    first: Any,
    stop: Any,
    hidden: Any,
    scores: Any,
    table: Any,
    weights: Any,
    slopes: Any,
    pairs: Any,
    key: Any,
    window: Any,
) -> None:
    """Weights and slopes of pairs [first, stop) of 16 of a square's keys; arguments as of `gradient_rows`.

    Products lie behind the square's scores.
    """
    products = scores + SQUARE_BYTES
    for pair in range(first, stop):
        # The second tile of 16 keys lies behind those of the strip's other squares.
        at = 2 * LINE * pair + pair // (HALF // 2) * (SQUARES - 1) * TILE_BYTES
        s, p, mine = scores + 8 * SQUARE * pair, products + 8 * SQUARE * pair, key + 2 * pair
        if hidden == VISIBLE:
            gradient_rows(0, s, p, table, weights + at, slopes + at, pairs + LINE * pair, mine, window)
        elif hidden == CAUSAL:
            gradient_rows(1, s, p, table, weights + at, slopes + at, pairs + LINE * pair, mine, window)
        else:
            gradient_rows(2, s, p, table, weights + at, slopes + at, pairs + LINE * pair, mine, window)


@njit(**SERIAL)
def multiply(
    keys: Any,
    queries: Any,
    values: Any,
    gradients: Any,
    target: Any,
    steps: Any,
    softened: Any,
    hidden: Any,
    scores: Any,
    table: Any,
    weights: Any,
    slopes: Any,
    pairs: Any,
    key: Any,
    window: Any,
) -> None:
    """Scores and products of a square at `target`, and `soften` of another one, a step here and some there.

    So the processor's tiles and its vectors work at once. `softened` is how many pairs the other has, or 0.
    """
    left, right, done = keys, queries, 0
    for half in range(2):
        lower = left + TILE_PAIR * steps
        zero_square()
        for step in range(1, steps + 1):
            split_step(left, lower, right)
            left += TILE_PAIR
            lower += TILE_PAIR
            right += 2 * TILE_PAIR
            until = softened * (half * steps + step) // (2 * steps)
            soften(done, until, hidden, scores, table, weights, slopes, pairs, key, window)
            done = until
        store_square(target, 4 * SQUARE)
        left, right, target = values, gradients, target + SQUARE_BYTES
