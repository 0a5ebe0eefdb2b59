"""Plain floats, the 32-value block formats and MXFP4, sixteen rows at once.

`make_<format>(kind)` gives the function

    rows(source, stride, blocks, left, tokens, sums)

that unpacks the first `blocks` blocks of 16 rows, which lie `stride` bytes apart at `source`, and does
with them what `kind` says; `kind`, `left`, `tokens` and `sums` are those of `_rows_sinks.add_block`. Float
formats take a multiple of 8 values. Layouts are described at the decoders in `_decode_legacy` and
`_decode_codebook`; the weights are the same bits.

The factories close over an integer alone: Numba's disk cache tells closures apart by their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._rows_kinds import FLOAT_BLOCK, SIGNED_BIAS
from ._rows_sinks import add_block, add_floats
from ._simd import to_floats
from ._simd_rows import (
    exponents,
    fields,
    flipped,
    float_bits,
    high_bfloat,
    high_half,
    low_bfloat,
    low_half,
    make_byte_codebook,
    prefetch_rows,
    read_words,
    spread_bits,
    with_bits,
)

Rows = Callable[..., None]

FLIP_SIGNS = -0x7F7F7F80
"""The top bit of each byte of a word."""
E2M1_BIAS = 12

iq4_values = make_byte_codebook(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), SIGNED_BIAS
)
e2m1_values = make_byte_codebook((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), E2M1_BIAS)


def make_f32(kind: int) -> Rows:
    """F32."""

    def f32(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks // FLOAT_BLOCK):
            p = 32 * b
            prefetch_rows(32, source, stride, p)
            u, v = read_words(source, stride, p), read_words(source, stride, p + 16)
            weights = (
                float_bits(u[0]),
                float_bits(u[1]),
                float_bits(u[2]),
                float_bits(u[3]),
                float_bits(v[0]),
                float_bits(v[1]),
                float_bits(v[2]),
                float_bits(v[3]),
            )
            add_floats(kind, left, tokens, sums, b, weights)

    return f32


def make_f16(kind: int) -> Rows:
    """F16."""

    def f16(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks // FLOAT_BLOCK):
            p = 16 * b
            prefetch_rows(16, source, stride, p)
            u = read_words(source, stride, p)
            weights = (
                low_half(u[0]),
                high_half(u[0]),
                low_half(u[1]),
                high_half(u[1]),
                low_half(u[2]),
                high_half(u[2]),
                low_half(u[3]),
                high_half(u[3]),
            )
            add_floats(kind, left, tokens, sums, b, weights)

    return f16


def make_bf16(kind: int) -> Rows:
    """BF16."""

    def bf16(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks // FLOAT_BLOCK):
            p = 16 * b
            prefetch_rows(16, source, stride, p)
            u = read_words(source, stride, p)
            weights = (
                low_bfloat(u[0]),
                high_bfloat(u[0]),
                low_bfloat(u[1]),
                high_bfloat(u[1]),
                low_bfloat(u[2]),
                high_bfloat(u[2]),
                low_bfloat(u[3]),
                high_bfloat(u[3]),
            )
            add_floats(kind, left, tokens, sums, b, weights)

    return bf16


def make_q4_0(kind: int) -> Rows:
    """Q4_0: w = d·(q - 8)."""

    def q4_0(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 18 * b
            prefetch_rows(18, source, stride, p)
            d = low_half(read_words(source, stride, p)[0])
            q = read_words(source, stride, p + 2)
            add_block(
                kind,
                15,
                8,
                left,
                tokens,
                sums,
                b,
                fields(q, 0, 0x0F0F0F0F),
                fields(q, 4, 0x0F0F0F0F),
                (d,),
                (),
            )

    return q4_0


def make_q4_1(kind: int) -> Rows:
    """Q4_1: w = d·q + m."""

    def q4_1(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 20 * b
            prefetch_rows(20, source, stride, p)
            head = read_words(source, stride, p)[0]
            q = read_words(source, stride, p + 4)
            low, high = fields(q, 0, 0x0F0F0F0F), fields(q, 4, 0x0F0F0F0F)
            add_block(kind, 15, 0, left, tokens, sums, b, low, high, (low_half(head),), (high_half(head),))

    return q4_1


def make_q5_0(kind: int) -> Rows:
    """Q5_0: w = d·(q - 16)."""

    def q5_0(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 22 * b
            prefetch_rows(22, source, stride, p)
            d = low_half(read_words(source, stride, p)[0])
            fifth = read_words(source, stride, p + 2)[0]
            q = read_words(source, stride, p + 6)
            low = with_bits(fields(q, 0, 0x0F0F0F0F), spread_bits(fifth, 0, 4), 0)
            high = with_bits(fields(q, 4, 0x0F0F0F0F), spread_bits(fifth, 16, 4), 0)
            add_block(kind, 31, 16, left, tokens, sums, b, low, high, (d,), ())

    return q5_0


def make_q5_1(kind: int) -> Rows:
    """Q5_1: w = d·q + m."""

    def q5_1(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 24 * b
            prefetch_rows(24, source, stride, p)
            head = read_words(source, stride, p)
            fifth = head[1]
            q = read_words(source, stride, p + 8)
            low = with_bits(fields(q, 0, 0x0F0F0F0F), spread_bits(fifth, 0, 4), 0)
            high = with_bits(fields(q, 4, 0x0F0F0F0F), spread_bits(fifth, 16, 4), 0)
            add_block(
                kind, 31, 0, left, tokens, sums, b, low, high, (low_half(head[0]),), (high_half(head[0]),)
            )

    return q5_1


def make_q8_0(kind: int) -> Rows:
    """Q8_0: w = d·q, q signed."""

    def q8_0(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 34 * b
            prefetch_rows(34, source, stride, p)
            d = low_half(read_words(source, stride, p)[0])
            first = flipped(read_words(source, stride, p + 2), FLIP_SIGNS)
            second = flipped(read_words(source, stride, p + 18), FLIP_SIGNS)
            add_block(kind, 255, SIGNED_BIAS, left, tokens, sums, b, first, second, (d,), ())

    return q8_0


def make_iq4_nl(kind: int) -> Rows:
    """IQ4_NL: w = d·table[q]."""

    def iq4_nl(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 18 * b
            prefetch_rows(18, source, stride, p)
            d = low_half(read_words(source, stride, p)[0])
            q = read_words(source, stride, p + 2)
            low, high = iq4_values(fields(q, 0, 0x0F0F0F0F)), iq4_values(fields(q, 4, 0x0F0F0F0F))
            add_block(kind, 255, SIGNED_BIAS, left, tokens, sums, b, low, high, (d,), ())

    return iq4_nl


def make_iq4_xs(kind: int) -> Rows:
    """IQ4_XS: w = (d·(scale - 32))·table[q]."""

    def iq4_xs(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 136 * b
            head = read_words(source, stride, p)
            d = low_half(head[0])
            for sub in range(8):
                prefetch_rows(17, source, stride, p + 17 * sub)
                low_bits = (head[1] >> (4 * sub)) & 15
                high_bits = (head[0] >> (16 + 2 * sub)) & 3
                scale = d * to_floats((low_bits | (high_bits << 4)) - 32)
                q = read_words(source, stride, p + 8 + 16 * sub)
                low, high = iq4_values(fields(q, 0, 0x0F0F0F0F)), iq4_values(fields(q, 4, 0x0F0F0F0F))
                add_block(kind, 255, SIGNED_BIAS, left, tokens, sums, 8 * b + sub, low, high, (scale,), ())

    return iq4_xs


def make_mxfp4(kind: int) -> Rows:
    """MXFP4: w = 2^(e - 128)·table[q], the table of twice the E2M1 values."""

    def mxfp4(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 17 * b
            prefetch_rows(17, source, stride, p)
            d = exponents(read_words(source, stride, p)[0] & 255)
            q = read_words(source, stride, p + 1)
            low, high = e2m1_values(fields(q, 0, 0x0F0F0F0F)), e2m1_values(fields(q, 4, 0x0F0F0F0F))
            add_block(kind, 24, E2M1_BIAS, left, tokens, sums, b, low, high, (d,), ())

    return mxfp4
