"""float32 as two halves of bfloat16, x = high + low, both rounded to nearest.

Those of `_simd_tiles` have their low half cut off. Attention with both cut off erred by 3e-5, nearly all of
it in one direction, with both rounded by 5e-6.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from ._math_lanes import INT_VECTOR, VECTOR
from ._rows_kinds import TILE_BYTES
from ._simd import FLOATS, I16, I32, I64, WIDTH, compiled_form, constant_vector, function
from ._simd_tiles import BFloatType, transposed

LINE = 64
"""Bytes of a vector."""


def narrowed(builder: Any, first: Any, second: Any) -> Any:
    """Two vectors as int16 bits of bfloat16 in one, rounded to nearest even."""
    kind = ir.VectorType(BFloatType(), 2 * WIDTH)
    convert = function(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, [VECTOR, VECTOR])
    return builder.bitcast(builder.call(convert, [second, first]), ir.VectorType(I16, 2 * WIDTH))


def _pairs(builder: Any, even: Any, odd: Any) -> tuple[Any, Any]:
    """High and low halves of two vectors, those of a lane side by side, as int32 lanes."""
    order = constant_vector(I32, [lane // 2 + WIDTH * (lane % 2) for lane in range(2 * WIDTH)])

    def paired(first: Any, second: Any) -> Any:
        both = narrowed(builder, first, second)
        return builder.bitcast(builder.shuffle_vector(both, both, order), INT_VECTOR)

    high = paired(even, odd)
    lower = builder.shl(high, constant_vector(I32, [16] * WIDTH))
    upper = builder.and_(high, constant_vector(I32, [-65536] * WIDTH))
    rests = (builder.fsub(one, builder.bitcast(bits, VECTOR)) for one, bits in ((even, lower), (odd, upper)))
    return high, paired(*rests)


def _store(builder: Any, place: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=LINE)


def _behind(builder: Any, place: Any, offset: int) -> Any:
    return builder.add(place, ir.Constant(I64, offset))


def _row(builder: Any, source: Any) -> tuple[Any, Any]:
    """32 float32 in memory as 16 lanes of pairs: high and low halves."""
    kind = ir.VectorType(VECTOR.element, 2 * WIDTH)
    floats = builder.load(builder.inttoptr(source, kind.as_pointer()), align=4)
    even, odd = (
        builder.shuffle_vector(floats, floats, constant_vector(I32, range(start, 2 * WIDTH, 2)))
        for start in range(2)
    )
    return _pairs(builder, even, odd)


def _emit_store_pair(builder: Any, place: Any, below: Any, above: Any) -> None:
    for half, value in enumerate(_pairs(builder, below, above)):
        _store(builder, _behind(builder, place, TILE_BYTES * half), value)


@compiled_form(lambda place, below, above: (types.void, (types.int64, FLOATS, FLOATS), _emit_store_pair))
def store_pair(place: int, below: Any, above: Any) -> None:
    """A row of a split right operand: lanes in pairs, high halves and a tile behind the low ones."""
    raise RuntimeError("store_pair has a compiled form only")


def _emit_halve(builder: Any, source: Any, place: Any) -> None:
    for half, value in enumerate(_row(builder, source)):
        _store(builder, _behind(builder, place, TILE_BYTES * half), value)


@compiled_form(lambda source, place: (types.void, (types.int64, types.int64), _emit_halve))
def halve(source: int, place: int) -> None:
    """A row of a split left operand from 32 float32: high halves and a tile behind the low ones."""
    raise RuntimeError("halve has a compiled form only")


def _emit_halve_turned(builder: Any, source: Any, stride: Any, place: Any) -> None:
    rows = []
    for _ in range(WIDTH):
        rows.append(_row(builder, source))
        source = builder.add(source, stride)
    for half in range(2):
        for i, column in enumerate(transposed(builder, [row[half] for row in rows])):
            _store(builder, _behind(builder, place, TILE_BYTES * half + LINE * i), column)


@compiled_form(lambda source, stride, place: (types.void, (types.int64,) * 3, _emit_halve_turned))
def halve_turned(source: int, stride: int, place: int) -> None:
    """Tiles of a split right operand, high and low, from 16 rows of 32 float32, each a column of it."""
    raise RuntimeError("halve_turned has a compiled form only")
