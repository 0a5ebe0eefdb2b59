"""The matrix product that attention and adapters are made of: a tile of accumulators in registers.

Element (i, j) of a tile is one chain of multiply-adds in the order of k. Cutting a product into tiles of
other shapes, or the sum over k into pieces, therefore never changes a bit.

Source: the outer-product microkernel of Goto & van de Geijn 2008, "Anatomy of high-performance matrix
multiplication".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ._math_lanes import (
    VECTOR,
    data_pointer,
    emit_load_some,
    emit_sum,
    is_float_array,
    multiply_add_vectors,
    vector_pointer,
)
from ._simd import F32, I64, WIDTH, compiled_form, constant_vector, splat
from ._simd_features import target_features
from ._simd_tiles import transposed

TILE_ROWS = 4
TILE_VECTORS = 4 if "avx512f" in target_features() else 1
"""With 32 registers of 16 lanes 16 accumulate; vectors that the processor splits count more than once."""
TILE_COLUMNS = WIDTH * TILE_VECTORS


def _tile(rows: Any, vectors: Any, fresh: Any, *rest: Any) -> Any:
    literals = (rows, vectors, fresh)
    if len(rest) != 11 or not all(isinstance(one, types.IntegerLiteral) for one in literals):
        return None
    if not all(is_float_array(rest[position]) for position in (0, 4, 7)):
        return None
    m, width, zeroed = (one.literal_value for one in literals)

    def emit(builder: Any, *arguments: Any) -> None:
        a, a_at, a_row, a_step, b, b_at, b_step, c, c_at, c_row, depth = arguments[3:]

        def plus(base: Any, stride: Any, factor: int) -> Any:
            return builder.add(base, builder.mul(stride, ir.Constant(I64, factor)))

        targets = [
            vector_pointer(builder, c, builder.add(plus(c_at, c_row, i), ir.Constant(I64, WIDTH * j)))
            for i in range(m)
            for j in range(width)
        ]
        zero = constant_vector(F32, [0.0] * WIDTH)
        starts = [zero if zeroed else builder.load(target, align=4) for target in targets]
        left = data_pointer(builder, a)
        before = builder.block
        loop = builder.append_basic_block("tile.loop")
        done = builder.append_basic_block("tile.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        index, a_place, b_place = (builder.phi(I64) for _ in range(3))
        sums = [builder.phi(VECTOR) for _ in targets]
        columns = [
            builder.load(
                vector_pointer(builder, b, builder.add(b_place, ir.Constant(I64, WIDTH * j))), align=4
            )
            for j in range(width)
        ]
        updated = []
        for i in range(m):
            factor = splat(builder, builder.load(builder.gep(left, [plus(a_place, a_row, i)])))
            updated += [
                multiply_add_vectors(builder, factor, columns[j], sums[i * width + j]) for j in range(width)
            ]
        following = builder.add(index, ir.Constant(I64, 1))
        flows = [
            (index, ir.Constant(I64, 0), following),
            (a_place, a_at, builder.add(a_place, a_step)),
            (b_place, b_at, builder.add(b_place, b_step)),
            *zip(sums, starts, updated, strict=True),
        ]
        for phi, first, later in flows:
            phi.add_incoming(first, before)
            phi.add_incoming(later, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
        builder.position_at_end(done)
        for target, value in zip(targets, updated, strict=True):
            builder.store(value, target, align=4)

    a_type, b_type, c_type = rest[0], rest[4], rest[7]
    integers = (types.int64,) * 3
    kinds = (*literals, a_type, *integers, b_type, *integers[:2], c_type, *integers)
    return types.void, kinds, emit


@compiled_form(_tile, literals=True)
def tile_product(
    rows: Any,
    vectors: Any,
    fresh: Any,
    a: Any,
    a_at: Any,
    a_row: Any,
    a_step: Any,
    b: Any,
    b_at: Any,
    b_step: Any,
    c: Any,
    c_at: Any,
    c_row: Any,
    depth: Any,
) -> None:
    """C (rows, 16·vectors) = (`fresh`) or += the sum over k < depth of A[:, k] times B[k, :]; depth >= 1.

    Flat indices: A[i, k] at a_at + i·a_row + k·a_step, B[k, j] at b_at + k·b_step + j, C[i, j] at
    c_at + i·c_row + j. The first three arguments are literals.
    """
    flat_a, flat_b, flat_c = a.reshape(-1), b.reshape(-1), c.reshape(-1)
    left = a_at + np.arange(rows) * a_row
    columns = WIDTH * vectors
    place = c_at + np.arange(rows)[:, None] * c_row + np.arange(columns)
    total = np.zeros((rows, columns), np.float32) if fresh else flat_c[place]
    for k in range(depth):
        right = flat_b[b_at + k * b_step : b_at + k * b_step + columns]
        total = total + flat_a[left + k * a_step][:, None] * right
    flat_c[place] = total


def _transpose(source: Any, *rest: Any) -> Any:
    if len(rest) != 5 or not (is_float_array(source) and is_float_array(rest[2])):
        return None

    def emit(
        builder: Any, source: Any, at: Any, stride: Any, target: Any, target_at: Any, target_stride: Any
    ) -> None:
        def row(i: int, first: Any, step: Any) -> Any:
            return builder.add(first, builder.mul(step, ir.Constant(I64, i)))

        rows = [
            builder.load(vector_pointer(builder, source, row(i, at, stride)), align=4) for i in range(WIDTH)
        ]
        for i, column in enumerate(transposed(builder, rows)):
            place = row(i, target_at, target_stride)
            builder.store(column, vector_pointer(builder, target, place), align=4)

    whole = types.int64
    return types.void, (source, whole, whole, rest[2], whole, whole), emit


@compiled_form(_transpose)
def transpose_square(
    source: Any, at: Any, stride: Any, target: Any, target_at: Any, target_stride: Any
) -> None:
    """Transpose the 16 x 16 block at `at`, whose rows are `stride` apart, to `target_at`."""
    numbers = np.arange(WIDTH)
    block = source.reshape(-1)[at + numbers[:, None] * stride + numbers]
    target.reshape(-1)[target_at + numbers[:, None] * target_stride + numbers] = block.T


def _dots(rows: Any, columns: Any, *rest: Any) -> Any:
    literals = (rows, columns)
    if len(rest) != 10 or not all(isinstance(one, types.IntegerLiteral) for one in literals):
        return None
    if not all(is_float_array(rest[position]) for position in (0, 3, 6)):
        return None
    m, n = (one.literal_value for one in literals)

    def emit(builder: Any, *arguments: Any) -> None:
        a, a_at, a_row, b, b_at, b_row, c, c_at, c_row, depth = arguments[2:]
        width = ir.Constant(I64, WIDTH)

        def plus(base: Any, stride: Any, factor: int) -> Any:
            return builder.add(base, builder.mul(stride, ir.Constant(I64, factor)))

        def multiplied(read: Callable[[Any, Any], Any], sums: Sequence[Any]) -> list[Any]:
            left = [read(a, plus(a_at, a_row, i)) for i in range(m)]
            right = [read(b, plus(b_at, b_row, j)) for j in range(n)]
            pairs = [(x, y) for x in left for y in right]
            return [multiply_add_vectors(builder, *pair, one) for pair, one in zip(pairs, sums, strict=True)]

        whole = builder.mul(builder.sdiv(depth, width), width)
        rest_count = builder.sub(depth, whole)
        before = builder.block
        loop = builder.append_basic_block("dots.loop")
        tail = builder.append_basic_block("dots.tail")
        builder.cbranch(builder.icmp_signed(">", whole, ir.Constant(I64, 0)), loop, tail)
        zero = constant_vector(F32, [0.0] * WIDTH)

        builder.position_at_end(loop)
        index = builder.phi(I64)
        sums = [builder.phi(VECTOR) for _ in range(m * n)]
        updated = multiplied(
            lambda x, at: builder.load(vector_pointer(builder, x, builder.add(at, index)), align=4), sums
        )
        following = builder.add(index, width)
        builder.cbranch(builder.icmp_signed("<", following, whole), loop, tail)
        index.add_incoming(ir.Constant(I64, 0), before)
        index.add_incoming(following, loop)
        for total, value in zip(sums, updated, strict=True):
            total.add_incoming(zero, before)
            total.add_incoming(value, loop)

        builder.position_at_end(tail)
        totals = [builder.phi(VECTOR) for _ in range(m * n)]
        for total, value in zip(totals, updated, strict=True):
            total.add_incoming(zero, before)
            total.add_incoming(value, loop)
        # Past the whole lanes zeros are added, which changes nothing where there is no rest.
        fill = ir.Constant(F32, 0.0)
        totals = multiplied(
            lambda x, at: emit_load_some(builder, x, builder.add(at, whole), rest_count, fill), totals
        )
        target = data_pointer(builder, c)
        for i in range(m):
            for j in range(n):
                place = builder.add(plus(c_at, c_row, i), ir.Constant(I64, j))
                builder.store(emit_sum(builder, totals[i * n + j]), builder.gep(target, [place]))

    integers = (types.int64,) * 2
    kinds = (*literals, rest[0], *integers, rest[3], *integers, rest[6], *integers, types.int64)
    return types.void, kinds, emit


@compiled_form(_dots, literals=True)
def dots(
    rows: Any,
    columns: Any,
    a: Any,
    a_at: Any,
    a_row: Any,
    b: Any,
    b_at: Any,
    b_row: Any,
    c: Any,
    c_at: Any,
    c_row: Any,
    depth: Any,
) -> None:
    """C (rows, columns) = A (rows, depth) · B (columns, depth)ᵀ, rows of A and B contiguous.

    Each element is 16 chains of multiply-adds, one a lane, added as a tree. Flat indices as in
    `tile_product`; the first two arguments are literals.
    """
    flat_a, flat_b, flat_c = a.reshape(-1), b.reshape(-1), c.reshape(-1)
    padded = -(-depth // WIDTH) * WIDTH
    left, right = np.zeros((rows, 1, padded), np.float32), np.zeros((columns, padded), np.float32)
    for i in range(rows):
        left[i, 0, :depth] = flat_a[a_at + i * a_row : a_at + i * a_row + depth]
    for j in range(columns):
        right[j, :depth] = flat_b[b_at + j * b_row : b_at + j * b_row + depth]
    total = np.zeros((rows, columns, WIDTH), np.float32)
    for k in range(0, padded, WIDTH):
        total = total + left[:, :, k : k + WIDTH] * right[:, k : k + WIDTH]
    while total.shape[2] > 1:
        half = total.shape[2] // 2
        total = total[:, :, :half] + total[:, :, half:]
    place = c_at + np.arange(rows)[:, None] * c_row + np.arange(columns)
    flat_c[place] = total[:, :, 0]
