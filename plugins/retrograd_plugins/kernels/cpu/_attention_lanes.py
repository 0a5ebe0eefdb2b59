"""What attention on tiles does with scores: operations on rows of keys, with queries side by side.

Source: 2^x from its exponent's bits and a polynomial, as in S. L. Moshier's Cephes, `exp2f`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ._attention_halves import narrowed
from ._math_lanes import INT_VECTOR, VECTOR, multiply_add_vectors
from ._rows_kinds import TILE_BYTES
from ._simd import F32, FLOATS, I32, I64, WIDTH, compiled_form, constant_vector, splat

VISIBLE, CAUSAL, WINDOWED, ALL = 0, 1, 2, 3
"""What is hidden in a square: nothing, later keys than a query, also too early ones, or all keys."""
SQUARE = 32
"""Keys and queries of a square."""
QUERY_TABLE = 3 * SQUARE
"""float32 that the queries of a square need: −lse·log2(e), delta and position, one row each."""
LOG2_E = 1.4426950408889634
NEGLIGIBLE = -60.0
"""No weight is below 2^-60, too little for a sum to feel: products of less are slow denormal numbers."""
POWER_POLYNOMIAL = (
    9.570102e-3,
    5.5917870e-2,
    2.40247448e-1,
    6.93121815e-1,
    9.99999261e-1,
)
"""2^r on |r| <= 1/2 with a relative error below 4e-6, highest power first: weights are rounded to 8 bits."""
EXACT_POLYNOMIAL = (1.326472715e-3, 9.67151264e-3, 5.5507337434e-2, 2.40222421e-1, 6.93146978e-1, 1.0)
"""2^r on |r| <= 1/2 with a relative error below 2e-7 and exact at 0, highest power first."""
MAGIC = 12582912.0
"""Adding 1.5·2^23 rounds to an integer, which is then in the low bits."""
LINE = 64


def _constant(value: float) -> Any:
    return constant_vector(F32, [float(np.float32(value))] * WIDTH)


def _load(builder: Any, base: Any, offset: int) -> Any:
    place = builder.add(base, ir.Constant(I64, offset))
    return builder.load(builder.inttoptr(place, VECTOR.as_pointer()), align=LINE)


def _store(builder: Any, base: Any, offset: int, value: Any) -> None:
    place = builder.add(base, ir.Constant(I64, offset))
    builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=LINE)


def _scaled(builder: Any, rest: Any, shifted: Any, polynomial: Sequence[float]) -> Any:
    """2^rest, a polynomial, times 2^n, where `shifted` holds n in its low bits."""
    value = _constant(polynomial[0])
    for coefficient in polynomial[1:]:
        value = multiply_add_vectors(builder, value, rest, _constant(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, INT_VECTOR), constant_vector(I32, [23] * WIDTH))
    return builder.bitcast(builder.add(builder.bitcast(value, INT_VECTOR), exponent), VECTOR)


def _not_below(builder: Any, x: Any, low: float) -> Any:
    """The larger of lanes and a number; lanes that are none stay."""
    bound = _constant(low)
    return builder.select(builder.fcmp_ordered("<", x, bound), bound, x)


def _power(builder: Any, x: Any) -> Any:
    """2^x of lanes up to 126; 2^-60 below."""
    x = _not_below(builder, x, NEGLIGIBLE)
    shifted = builder.fadd(x, _constant(MAGIC))
    rest = builder.fsub(x, builder.fsub(shifted, _constant(MAGIC)))
    return _scaled(builder, rest, shifted, POWER_POLYNOMIAL)


def _emit_weight(builder: Any, x: Any) -> Any:
    x = _not_below(builder, x, NEGLIGIBLE / LOG2_E)
    shifted = multiply_add_vectors(builder, x, _constant(LOG2_E), _constant(MAGIC))
    whole = builder.fsub(_constant(MAGIC), shifted)
    rest = multiply_add_vectors(builder, x, _constant(LOG2_E), whole)
    return _scaled(builder, rest, shifted, EXACT_POLYNOMIAL)


@compiled_form(lambda x: (FLOATS, (FLOATS,), _emit_weight))
def weight_lanes(x: Any) -> Any:
    """exp(x) of x <= 0 with a relative error of float32, 2^-60 below."""
    raise RuntimeError("weight_lanes has a compiled form only")


def _emit_visible(builder: Any, lanes: Any, value: Any, bound: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">=", value, bound), lanes, _constant(float("-inf")))


@compiled_form(lambda lanes, value, bound: (FLOATS, (FLOATS,) * 3, _emit_visible))
def keep_visible(lanes: Any, value: Any, bound: Any) -> Any:
    """The lanes where value >= bound, and −inf in the rest."""
    raise RuntimeError("keep_visible has a compiled form only")


def _gradient_rows(hidden: Any, *rest: Any) -> Any:
    if len(rest) != 8 or not isinstance(hidden, types.IntegerLiteral):
        return None
    kind = hidden.literal_value

    def emit(
        builder: Any,
        _: Any,
        scores: Any,
        products: Any,
        table: Any,
        weights: Any,
        slopes: Any,
        pairs: Any,
        key: Any,
        window: Any,
    ) -> None:
        rounded = []
        zero = _constant(0.0)
        for row in range(2):
            mine = builder.add(key, ir.Constant(I64, row))
            nearest = splat(builder, builder.sitofp(mine, F32))
            last = builder.sub(builder.add(mine, window), ir.Constant(I64, 1))
            farthest = splat(builder, builder.sitofp(last, F32))
            found = []
            for half in range(2):
                at = 4 * WIDTH * half
                place = 4 * SQUARE * row + at
                power = multiply_add_vectors(
                    builder, _load(builder, scores, place), _constant(LOG2_E), _load(builder, table, at)
                )
                weight = _power(builder, power)
                delta = _load(builder, table, 4 * SQUARE + at)
                slope = builder.fmul(weight, builder.fsub(_load(builder, products, place), delta))
                if kind != VISIBLE:
                    position = _load(builder, table, 8 * SQUARE + at)
                    seen = builder.fcmp_ordered(">=", position, nearest)
                    if kind == WINDOWED:
                        seen = builder.and_(seen, builder.fcmp_ordered(">=", farthest, position))
                    weight, slope = (builder.select(seen, one, zero) for one in (weight, slope))
                found.append((weight, slope))
            (weight, slope), (next_weight, next_slope) = found
            _store(builder, weights, LINE * row, narrowed(builder, weight, next_weight))
            narrow = narrowed(builder, slope, next_slope)
            _store(builder, slopes, LINE * row, narrow)
            rounded.append(narrow)
        for half in range(2):
            numbers = [WIDTH * half + lane // 2 + 2 * WIDTH * (lane % 2) for lane in range(2 * WIDTH)]
            both = builder.shuffle_vector(*rounded, constant_vector(I32, numbers))
            _store(builder, pairs, TILE_BYTES * half, both)

    return types.void, (hidden, *[types.int64] * 8), emit


@compiled_form(_gradient_rows, literals=True)
def gradient_rows(
    hidden: int,
    scores: int,
    products: int,
    table: int,
    weights: int,
    slopes: int,
    pairs: int,
    key: int,
    window: int,
) -> None:
    """Weights p and slopes p · (dp − delta) of two keys, from `key` on, and the 32 queries of a square.

    `scores` and `products` dp are two rows of 32 float32. Both results are rounded to bfloat16: two rows of
    32 each, 64 bytes apart, and the slopes once more at `pairs`, the two keys' values of each query side by
    side, 16 queries there and 16 a tile (1024 bytes) behind. `hidden` is a literal, `table` a row of
    `QUERY_TABLE` float32, in which positions count as `key` does.
    """
    raise RuntimeError("gradient_rows has a compiled form only")
