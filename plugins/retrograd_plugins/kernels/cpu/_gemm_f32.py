"""The float32 variants: one register tile, generated for vectors of 16, 8 or 4 lanes.

Activations are converted to blocks of `rows` tokens, interleaved: (block, k, token). Each element of
the result is one chain of multiply-adds over k, whatever the tile it falls in.

Source: the outer-product microkernel of Goto & van de Geijn 2008, "Anatomy of high-performance matrix
multiplication", and of BLIS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from ._gemm_kernels import MULTIPLY_SIGNATURE, PACK_SIGNATURE, Product, Variant, compiled
from ._simd_memory import peek, poke
from ._simd_tiles import copy_floats, float_tile, transpose_floats

TILES: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {"avx512": (12, 4, 16), "avx2": (6, 2, 8), "portable": (6, 2, 4)}
)
"""Tokens of a tile, tokens of the smaller tile for what is left, lanes of a vector.

A tile is two vectors wide: with 32 registers 24 accumulate, with 16 registers 12.
"""

VECTORS = 2


def float_variant(name: str) -> Variant:
    """The variant `name` of TILES, compiled."""
    rows, few, lanes = TILES[name]
    forward = Product(
        convert=compiled(PACK_SIGNATURE, _make_convert(rows)),
        pack=compiled(PACK_SIGNATURE, _make_pack_rows(lanes)),
        multiply=compiled(MULTIPLY_SIGNATURE, _make_multiply(rows, few, lanes)),
        activation_step=2 * rows,
        depth=1024 if lanes == 16 else 512,
    )
    gradient = attrs.evolve(forward, pack=compiled(PACK_SIGNATURE, _make_pack_columns(lanes)))
    return Variant(
        name=name,
        forward=forward,
        gradient=gradient,
        precise_gradient=gradient,
        width=VECTORS * lanes,
        token_block=rows,
    )


def _make_convert(rows: int) -> Callable[..., None]:
    # The factories close over integers alone: Numba's disk cache tells closures apart by their values.
    def convert(x: Any, x_stride: Any, tokens: Any, count: Any, a: Any, a_stride: Any) -> None:
        for i in range(count):
            for j in range(tokens):
                poke(a + 4 * (i * rows + j), peek(x + 4 * (j * x_stride + i)))

    return convert


def _make_pack_rows(lanes: int) -> Callable[..., None]:
    width = VECTORS * lanes

    def pack_rows(source: Any, stride: Any, columns: Any, count: Any, b: Any, b_stride: Any) -> None:
        padded = (count + lanes - 1) // lanes * lanes
        for j in range(columns):
            for i in range(count, padded):
                poke(source + 4 * (j * stride + i), np.float32(0.0))
        for j in range(columns, width):
            for i in range(padded):
                poke(source + 4 * (j * stride + i), np.float32(0.0))
        for i in range(0, padded, lanes):
            for j in range(0, width, lanes):
                transpose_floats(
                    lanes, source + 4 * (j * stride + i), 4 * stride, b + 4 * (i * width + j), 4 * width
                )

    return pack_rows


def _make_pack_columns(lanes: int) -> Callable[..., None]:
    width = VECTORS * lanes

    def pack_columns(source: Any, stride: Any, count: Any, columns: Any, b: Any, b_stride: Any) -> None:
        padded = (columns + width - 1) // width * width
        for i in range(count):
            for j in range(columns, padded):
                poke(source + 4 * (i * stride + j), np.float32(0.0))
            for j in range(0, padded, lanes):
                place = j // width * b_stride + i * width + j % width
                copy_floats(lanes, source + 4 * (i * stride + j), b + 4 * place)

    return pack_columns


def _make_multiply(rows: int, few: int, lanes: int) -> Callable[..., None]:
    width = VECTORS * lanes
    vectors = VECTORS

    def multiply(
        a: Any,
        a_stride: Any,
        b: Any,
        b_stride: Any,
        c: Any,
        c_stride: Any,
        tokens: Any,
        columns: Any,
        depth: Any,
        accumulate: Any,
        spare: Any,
        more_a: Any,
        more_a_stride: Any,
        more_b: Any,
        more_b_stride: Any,
        more_depth: Any,
    ) -> None:
        for t in range(0, tokens, rows):
            height = min(rows, tokens - t)
            for n in range(0, columns, width):
                place = c + 4 * (t * c_stride + n)
                whole = columns - n >= width
                target = place if whole else spare
                stride = 4 * c_stride if whole else 4 * width
                if not whole and accumulate:
                    for i in range(height):
                        for j in range(columns - n):
                            poke(spare + i * stride + 4 * j, peek(place + 4 * (i * c_stride + j)))
                left, right = a + 4 * t * a_stride, b + 4 * (n // width) * b_stride
                steps, add = depth, accumulate
                for _ in range(2 if more_depth else 1):
                    done = 0
                    if height == rows:
                        float_tile(rows, vectors, lanes, rows, left, right, target, stride, steps, add)
                        done = rows
                    while height - done >= few:
                        source, result = left + 4 * done, target + done * stride
                        float_tile(few, vectors, lanes, rows, source, right, result, stride, steps, add)
                        done += few
                    while done < height:
                        source, result = left + 4 * done, target + done * stride
                        float_tile(1, vectors, lanes, rows, source, right, result, stride, steps, add)
                        done += 1
                    left, right = more_a + 4 * t * more_a_stride, more_b + 4 * (n // width) * more_b_stride
                    steps, add = more_depth, 1
                if not whole:
                    for i in range(height):
                        for j in range(columns - n):
                            poke(place + 4 * (i * c_stride + j), peek(spare + i * stride + 4 * j))

    return multiply
