"""The AMX variant: products of bfloat16 tiles of 16 x 32 with float32 sums.

Activations are the left operand, in tiles of 16 tokens; weights the right one, in tiles of 16 pairs of rows.
Sub-panels are two tiles (32 columns) wide.

Forward products keep the precision of float32. Both operands are split into halves of bfloat16,
x = high + low, and low·high + high·high + high·low is summed; low·low is below what a float32 sum keeps.
Halves lie one after the other, (16 tokens, step of 32, half) for activations and (step of 32, tile, half)
for weights. Rounding either operand instead moves gradients of adapters by several percent. The products of
the backward pass lose less by it: their operands are rounded to bfloat16, unless precision is asked for.
The variant "amx-bf16" multiplies the high halves alone, a third of the products, as frameworks that train
in bfloat16 do.

Source: Intel Architecture Instruction Set Extensions, TDPBF16PS: each element sums its pairs in order, so a
row's result does not depend on the other rows of the tile. Splitting: Henry, Tang & Heinecke 2019,
"Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
from numba import njit

from retrograd_hookspecs import KernelError

from ._gemm_kernels import MULTIPLY_SIGNATURE, PACK_SIGNATURE, Product, Variant, compiled
from ._rows_kinds import TILE_BYTES, TILE_PAIR
from ._simd_features import usable_variants
from ._simd_memory import PREFETCHED, peek, poke, prefetch_for_writing
from ._simd_tiles import (
    convert_bfloats,
    pack_tile_from_columns,
    pack_tiles_from_columns,
    pack_tiles_from_rows,
    poke_bfloat,
    poke_split,
    split_bfloats,
    tile_load,
    tile_multiply,
    tile_store,
    tile_zero,
    tiles_configure,
    tiles_release,
)

WIDTH = 32
GROUP = 16
"""Tokens of a tile."""
LINE = 64
"""Bytes of a tile's row."""
PANEL_FLOATS = 224 << 10
"""Somewhat less than half of the second cache, which is 2 MiB on every processor with AMX."""
SPLIT, PLAIN, HIGH = 0, 1, 2
"""Operands of a product: in halves, plain bfloat16, or in halves of which the high ones alone count."""
INLINE: Mapping[str, Any] = MappingProxyType({"inline": "always"})


def tile_variant(name: str) -> Variant:
    """The variant "amx" or "amx-bf16", compiled.

    Raises:
        KernelError: the processor has no AMX, or the system does not grant it to this process.
    """
    if "amx" not in usable_variants():
        raise KernelError(
            "the amx kernels cannot run in this process: the processor has no AMX, or the system refused"
            " its tile state; set [plugin.cpu] kernels to another variant, or to auto"
        )
    forward = Product(
        convert=compiled(PACK_SIGNATURE, _split),
        pack=compiled(PACK_SIGNATURE, _pack_rows),
        multiply=compiled(MULTIPLY_SIGNATURE, _make_multiply(SPLIT)),
        activation_step=2 * GROUP,
        depth=2048,
        panel_floats=PANEL_FLOATS,
        decoding=128,
        whole_steps=True,
    )
    rounded = name == "amx-bf16"
    high = compiled(MULTIPLY_SIGNATURE, _make_multiply(HIGH)) if rounded else forward.multiply
    return Variant(
        name=name,
        forward=attrs.evolve(forward, multiply=high),
        gradient=Product(
            convert=compiled(PACK_SIGNATURE, _convert),
            pack=compiled(PACK_SIGNATURE, _pack_columns),
            multiply=compiled(MULTIPLY_SIGNATURE, _make_multiply(PLAIN)),
            weights_per_float=2,
            activation_step=GROUP,
            depth=1536,
            panel_floats=PANEL_FLOATS,
            decoding=512,
            whole_steps=True,
        ),
        precise_gradient=attrs.evolve(forward, pack=compiled(PACK_SIGNATURE, _pack_split_columns)),
        width=WIDTH,
        token_block=WIDTH,
        tiles=True,
        rounded=rounded,
    )


def _split(x: Any, x_stride: Any, tokens: Any, count: Any, a: Any, a_stride: Any) -> None:
    whole = count // WIDTH * WIDTH
    padded = (count + WIDTH - 1) // WIDTH * WIDTH
    for t in range(tokens):
        source = x + 4 * t * x_stride
        target = a + 4 * (t // GROUP * GROUP) * a_stride + t % GROUP * LINE
        for i in range(0, whole, WIDTH):
            place = target + i // WIDTH * TILE_PAIR
            split_bfloats(source + 4 * i, place, place + TILE_BYTES)
        place = target + whole // WIDTH * TILE_PAIR
        for i in range(whole, padded):
            value = peek(source + 4 * i) if i < count else np.float32(0.0)
            poke_split(place + 2 * (i - whole), place + TILE_BYTES + 2 * (i - whole), value)


def _convert(x: Any, x_stride: Any, tokens: Any, count: Any, a: Any, a_stride: Any) -> None:
    whole = count // WIDTH * WIDTH
    padded = (count + WIDTH - 1) // WIDTH * WIDTH
    for t in range(tokens):
        source = x + 4 * t * x_stride
        target = a + 4 * (t // GROUP * GROUP) * a_stride + t % GROUP * LINE
        for i in range(0, whole, WIDTH):
            convert_bfloats(source + 4 * i, target + i // WIDTH * TILE_BYTES)
        place = target + whole // WIDTH * TILE_BYTES
        for i in range(whole, padded):
            value = peek(source + 4 * i) if i < count else np.float32(0.0)
            poke_bfloat(place + 2 * (i - whole), value)


def _pack_rows(source: Any, stride: Any, columns: Any, count: Any, b: Any, b_stride: Any) -> None:
    padded = (count + WIDTH - 1) // WIDTH * WIDTH
    for j in range(columns):
        for i in range(count, padded):
            poke(source + 4 * (j * stride + i), np.float32(0.0))
    for j in range(columns, WIDTH):
        for i in range(padded):
            poke(source + 4 * (j * stride + i), np.float32(0.0))
    for i in range(0, padded, WIDTH):
        for half in range(2):
            place = b + (i // WIDTH * 2 + half) * TILE_PAIR
            rows = source + 4 * (16 * half * stride + i)
            pack_tiles_from_rows(rows, 4 * stride, place, place + TILE_BYTES)


def _pack_columns(source: Any, stride: Any, count: Any, columns: Any, b: Any, b_stride: Any) -> None:
    padded = (columns + WIDTH - 1) // WIDTH * WIDTH
    for i in range(count):
        for j in range(columns, padded):
            poke(source + 4 * (i * stride + j), np.float32(0.0))
    for i in range(count, (count + WIDTH - 1) // WIDTH * WIDTH):
        for j in range(padded):
            poke(source + 4 * (i * stride + j), np.float32(0.0))
    for i in range(0, count, WIDTH):
        for j in range(0, padded, 16):
            place = b + 4 * (j // WIDTH) * b_stride + (i // WIDTH * 2 + j // 16 % 2) * TILE_BYTES
            pack_tile_from_columns(source + 4 * (i * stride + j), 4 * stride, place)


def _pack_split_columns(source: Any, stride: Any, count: Any, columns: Any, b: Any, b_stride: Any) -> None:
    padded = (columns + WIDTH - 1) // WIDTH * WIDTH
    for i in range(count):
        for j in range(columns, padded):
            poke(source + 4 * (i * stride + j), np.float32(0.0))
    for i in range(count, (count + WIDTH - 1) // WIDTH * WIDTH):
        for j in range(padded):
            poke(source + 4 * (i * stride + j), np.float32(0.0))
    for i in range(0, count, WIDTH):
        for j in range(0, padded, 16):
            place = b + 4 * (j // WIDTH) * b_stride + (i // WIDTH * 2 + j // 16 % 2) * TILE_PAIR
            pack_tiles_from_columns(source + 4 * (i * stride + j), 4 * stride, place, place + TILE_BYTES)


def _make_multiply(operands: int) -> Callable[..., None]:
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
        steps, more_steps = (depth + WIDTH - 1) // WIDTH, (more_depth + WIDTH - 1) // WIDTH
        row, more_row = 4 * a_stride, 4 * more_a_stride
        group, more_group = GROUP * row, GROUP * more_row
        tiles_configure()
        for t in range(0, tokens, WIDTH):
            height = min(WIDTH, tokens - t)
            tall = height > GROUP
            left, more_left = a + t * row, more_a + t * more_row
            for n in range(0, columns, WIDTH):
                width = min(WIDTH, columns - n)
                wide = width > GROUP
                whole = height == WIDTH and width == WIDTH
                place = c + 4 * (t * c_stride + n)
                if whole and t + 2 * WIDTH <= tokens:
                    # Storing a tile to lines in no cache would wait for each of them.
                    coming = place + 4 * WIDTH * c_stride
                    for i in range(0, WIDTH, PREFETCHED):
                        prefetch_for_writing(coming + 4 * i * c_stride, 4 * c_stride)
                        prefetch_for_writing(coming + 4 * i * c_stride + LINE, 4 * c_stride)
                target = place if whole else spare
                stride = 4 * c_stride if whole else 4 * WIDTH
                lower = target + GROUP * stride
                if not whole and accumulate:
                    for i in range(height):
                        for j in range(width):
                            poke(spare + 4 * (i * WIDTH + j), peek(place + 4 * (i * c_stride + j)))
                if accumulate:
                    tile_load(0, target, stride)
                    if wide:
                        tile_load(1, target + LINE, stride)
                    if tall:
                        tile_load(2, lower, stride)
                        if wide:
                            tile_load(3, lower + LINE, stride)
                else:
                    tile_zero(0)
                    tile_zero(1)
                    tile_zero(2)
                    tile_zero(3)
                right = b + 4 * (n // WIDTH) * b_stride
                more_right = more_b + 4 * (n // WIDTH) * more_b_stride
                if operands == SPLIT:
                    _split_sums(left, group, right, steps, tall, wide)
                    _split_sums(more_left, more_group, more_right, more_steps, tall, wide)
                else:
                    _sums(left, group, right, steps, tall, wide, operands)
                    _sums(more_left, more_group, more_right, more_steps, tall, wide, operands)
                tile_store(0, target, stride)
                if wide:
                    tile_store(1, target + LINE, stride)
                if tall:
                    tile_store(2, lower, stride)
                    if wide:
                        tile_store(3, lower + LINE, stride)
                if not whole:
                    for i in range(height):
                        for j in range(width):
                            poke(place + 4 * (i * c_stride + j), peek(spare + 4 * (i * WIDTH + j)))
        tiles_release()

    return multiply


# Sums over the steps: 32 tokens (16 unless `tall`) by 32 columns (16 unless `wide`), in registers 0 to 3.


@njit(**INLINE)
def _sums(left: Any, group: Any, right: Any, steps: Any, tall: Any, wide: Any, operands: Any) -> None:
    # Of halves the high one is read, and the low one passed over.
    size = TILE_PAIR if operands == HIGH else TILE_BYTES
    lower = left + group
    for _ in range(steps):
        tile_load(4, left, LINE)
        tile_load(6, right, LINE)
        tile_multiply(0, 4, 6)
        if wide:
            tile_load(7, right + size, LINE)
            tile_multiply(1, 4, 7)
        if tall:
            tile_load(5, lower, LINE)
            tile_multiply(2, 5, 6)
            if wide:
                tile_multiply(3, 5, 7)
        left += size
        lower += size
        right += 2 * size


@njit(**INLINE)
def _split_sums(left: Any, group: Any, right: Any, steps: Any, tall: Any, wide: Any) -> None:
    lower = left + group
    for _ in range(steps):
        tile_load(6, left + TILE_BYTES, LINE)
        tile_load(4, right, LINE)
        tile_multiply(0, 6, 4)
        if wide:
            tile_load(5, right + TILE_PAIR, LINE)
            tile_multiply(1, 6, 5)
        if tall:
            tile_load(7, lower + TILE_BYTES, LINE)
            tile_multiply(2, 7, 4)
            if wide:
                tile_multiply(3, 7, 5)
        tile_load(6, left, LINE)
        tile_multiply(0, 6, 4)
        if wide:
            tile_multiply(1, 6, 5)
        if tall:
            tile_load(7, lower, LINE)
            tile_multiply(2, 7, 4)
            if wide:
                tile_multiply(3, 7, 5)
        tile_load(4, right + TILE_BYTES, LINE)
        tile_multiply(0, 6, 4)
        if tall:
            tile_multiply(2, 7, 4)
        if wide:
            tile_load(5, right + TILE_PAIR + TILE_BYTES, LINE)
            tile_multiply(1, 6, 5)
            if tall:
                tile_multiply(3, 7, 5)
        left += TILE_PAIR
        lower += TILE_PAIR
        right += 2 * TILE_PAIR
