"""Decoders of plain floats and of the 32-value block formats Q4_0 to Q8_0.

Every decoder has the signature

    decode(source, source_stride, rows, blocks, target, target_stride)

and expands `blocks` blocks of each of `rows` rows: row r begins at byte r·source_stride of `source`
(uint8) and its values go to float32 elements from r·target_stride of `target`. The arithmetic is ggml's in
float32, operation by operation, so the values are the same bits.

Source: block layouts of ggml (`ggml-common.h`), as `gguf.quants` documents them.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ._simd import (
    bits,
    read_bfloat,
    read_bfloats,
    read_bytes,
    read_float,
    read_floats,
    read_half,
    read_halves,
    read_signed_bytes,
    to_floats,
    write_floats,
)


@njit
def f32(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """F32: `blocks` single values."""
    whole = blocks // 16 * 16
    for r in range(rows):
        for j in range(0, whole, 16):
            write_floats(target, r * target_stride + j, read_floats(source, r * source_stride + 4 * j))
        for j in range(whole, blocks):
            target[r * target_stride + j] = read_float(source, r * source_stride + 4 * j)


@njit
def f16(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """F16: `blocks` single values."""
    whole = blocks // 16 * 16
    for r in range(rows):
        for j in range(0, whole, 16):
            write_floats(target, r * target_stride + j, read_halves(source, r * source_stride + 2 * j))
        for j in range(whole, blocks):
            target[r * target_stride + j] = read_half(source, r * source_stride + 2 * j)


@njit
def bf16(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """BF16: `blocks` single values."""
    whole = blocks // 16 * 16
    for r in range(rows):
        for j in range(0, whole, 16):
            write_floats(target, r * target_stride + j, read_bfloats(source, r * source_stride + 2 * j))
        for j in range(whole, blocks):
            target[r * target_stride + j] = read_bfloat(source, r * source_stride + 2 * j)


@njit
def q4_0(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q4_0, 18 bytes: scale d, 16 bytes of quant pairs (j, j + 16). w = d·(q - 8)."""
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 18 * b, r * target_stride + 32 * b
            d = read_half(source, p)
            q = read_bytes(source, p + 2)
            write_floats(target, o, to_floats((q & 15) - 8) * d)
            write_floats(target, o + 16, to_floats((q >> 4) - 8) * d)


@njit
def q4_1(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q4_1, 20 bytes: scale d, minimum m, quant pairs. w = d·q + m."""
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 20 * b, r * target_stride + 32 * b
            d, m = read_half(source, p), read_half(source, p + 2)
            q = read_bytes(source, p + 4)
            write_floats(target, o, to_floats(q & 15) * d + m)
            write_floats(target, o + 16, to_floats(q >> 4) * d + m)


@njit
def _word(source: Any, p: Any) -> Any:
    """Two bytes as an unsigned number."""
    return int(source[p]) | (int(source[p + 1]) << 8)


@njit
def q5_0(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q5_0, 22 bytes: scale d, 32 fifth bits, quant pairs. w = d·(q - 16)."""
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 22 * b, r * target_stride + 32 * b
            d = read_half(source, p)
            low, high = bits(_word(source, p + 2)), bits(_word(source, p + 4))
            q = read_bytes(source, p + 6)
            write_floats(target, o, to_floats(((q & 15) | (low << 4)) - 16) * d)
            write_floats(target, o + 16, to_floats(((q >> 4) | (high << 4)) - 16) * d)


@njit
def q5_1(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q5_1, 24 bytes: scale d, minimum m, 32 fifth bits, quant pairs. w = d·q + m."""
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 24 * b, r * target_stride + 32 * b
            d, m = read_half(source, p), read_half(source, p + 2)
            low, high = bits(_word(source, p + 4)), bits(_word(source, p + 6))
            q = read_bytes(source, p + 8)
            write_floats(target, o, to_floats((q & 15) | (low << 4)) * d + m)
            write_floats(target, o + 16, to_floats((q >> 4) | (high << 4)) * d + m)


@njit
def q8_0(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q8_0, 34 bytes: scale d, 32 signed quants. w = d·q."""
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 34 * b, r * target_stride + 32 * b
            d = read_half(source, p)
            write_floats(target, o, to_floats(read_signed_bytes(source, p + 2)) * d)
            write_floats(target, o + 16, to_floats(read_signed_bytes(source, p + 18)) * d)
