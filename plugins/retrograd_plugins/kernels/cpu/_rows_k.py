"""The K-quants, sixteen rows at once. Signature and conventions are those of `_rows_legacy`.

Layouts are described at the decoders in `_decode_k`; the weights are the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._rows_legacy import Rows
from ._rows_sinks import add_block
from ._simd import to_floats
from ._simd_rows import fields, high_half, low_half, prefetch_rows, read_words, with_bits


def make_q2_k(kind: int) -> Rows:
    """Q2_K: w = (d·scale)·q - dmin·minimum, a scale for every 16 values."""

    def q2_k(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 84 * b
            factors = read_words(source, stride, p + 68)[3]
            d, dmin = low_half(factors), high_half(factors) * np.float32(-1.0)
            for half in range(2):
                scales = read_words(source, stride, p + 8 * half)
                first = read_words(source, stride, p + 16 + 32 * half)
                second = read_words(source, stride, p + 32 + 32 * half)
                for pair in range(4):
                    prefetch_rows(11, source, stride, p + 42 * half + 10 * pair)
                    word = (scales[0] if pair < 2 else scales[1]) >> (16 * (pair & 1))
                    add_block(
                        kind,
                        3,
                        0,
                        left,
                        tokens,
                        sums,
                        8 * b + 4 * half + pair,
                        fields(first, 2 * pair, 0x03030303),
                        fields(second, 2 * pair, 0x03030303),
                        (d * to_floats(word & 15), d * to_floats((word >> 8) & 15)),
                        (dmin * to_floats((word >> 4) & 15), dmin * to_floats((word >> 12) & 15)),
                    )

    return q2_k


def make_q3_k(kind: int) -> Rows:
    """Q3_K: w = (d·(scale - 32))·(q - 4), a scale for every 16 values."""

    def q3_k(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 110 * b
            d = high_half(read_words(source, stride, p + 94)[3])
            packed = read_words(source, stride, p + 92)
            third, third_second = read_words(source, stride, p), read_words(source, stride, p + 16)
            for half in range(2):
                # Four 6-bit scales a word: for the first and the last two of the four blocks.
                low = fields(packed, 4 * half, 0x0F0F0F0F)
                high = packed[3] >> (4 * half)
                early = low[1] | ((high & 0x03030303) << 4)
                late = low[2] | (((high >> 2) & 0x03030303) << 4)
                first = read_words(source, stride, p + 32 + 32 * half)
                second = read_words(source, stride, p + 48 + 32 * half)
                for pair in range(4):
                    prefetch_rows(14, source, stride, p + 55 * half + 14 * pair)
                    word = (early if pair < 2 else late) >> (16 * (pair & 1))
                    shift = 4 * half + pair
                    add_block(
                        kind,
                        7,
                        4,
                        left,
                        tokens,
                        sums,
                        8 * b + 4 * half + pair,
                        with_bits(fields(first, 2 * pair, 0x03030303), fields(third, shift, 0x01010101), 2),
                        with_bits(
                            fields(second, 2 * pair, 0x03030303), fields(third_second, shift, 0x01010101), 2
                        ),
                        (d * to_floats((word & 63) - 32), d * to_floats(((word >> 8) & 63) - 32)),
                        (),
                    )

    return q3_k


def make_q4_k(kind: int) -> Rows:
    """Q4_K: w = (d·scale)·q - dmin·minimum, a scale for every 32 values."""

    def q4_k(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 144 * b
            head = read_words(source, stride, p)
            d, dmin = low_half(head[0]), high_half(head[0]) * np.float32(-1.0)
            scales, minima = head[1] & 0x3F3F3F3F, head[2] & 0x3F3F3F3F
            late_scales = (head[3] & 0x0F0F0F0F) | ((head[1] >> 2) & 0x30303030)
            late_minima = ((head[3] >> 4) & 0x0F0F0F0F) | ((head[2] >> 2) & 0x30303030)
            for pair in range(4):
                prefetch_rows(36, source, stride, p + 36 * pair)
                scale_word = (scales if pair < 2 else late_scales) >> (16 * (pair & 1))
                minimum_word = (minima if pair < 2 else late_minima) >> (16 * (pair & 1))
                first = read_words(source, stride, p + 16 + 32 * pair)
                second = read_words(source, stride, p + 32 + 32 * pair)
                for nibble in range(2):
                    add_block(
                        kind,
                        15,
                        0,
                        left,
                        tokens,
                        sums,
                        8 * b + 2 * pair + nibble,
                        fields(first, 4 * nibble, 0x0F0F0F0F),
                        fields(second, 4 * nibble, 0x0F0F0F0F),
                        (d * to_floats((scale_word >> (8 * nibble)) & 255),),
                        (dmin * to_floats((minimum_word >> (8 * nibble)) & 255),),
                    )

    return q4_k


def make_q5_k(kind: int) -> Rows:
    """Q5_K: w = (d·scale)·q - dmin·minimum, a scale for every 32 values."""

    def q5_k(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 176 * b
            head = read_words(source, stride, p)
            d, dmin = low_half(head[0]), high_half(head[0]) * np.float32(-1.0)
            scales, minima = head[1] & 0x3F3F3F3F, head[2] & 0x3F3F3F3F
            late_scales = (head[3] & 0x0F0F0F0F) | ((head[1] >> 2) & 0x30303030)
            late_minima = ((head[3] >> 4) & 0x0F0F0F0F) | ((head[2] >> 2) & 0x30303030)
            fifth, fifth_second = read_words(source, stride, p + 16), read_words(source, stride, p + 32)
            for pair in range(4):
                prefetch_rows(44, source, stride, p + 44 * pair)
                scale_word = (scales if pair < 2 else late_scales) >> (16 * (pair & 1))
                minimum_word = (minima if pair < 2 else late_minima) >> (16 * (pair & 1))
                first = read_words(source, stride, p + 48 + 32 * pair)
                second = read_words(source, stride, p + 64 + 32 * pair)
                for nibble in range(2):
                    sub = 2 * pair + nibble
                    add_block(
                        kind,
                        31,
                        0,
                        left,
                        tokens,
                        sums,
                        8 * b + sub,
                        with_bits(fields(first, 4 * nibble, 0x0F0F0F0F), fields(fifth, sub, 0x01010101), 4),
                        with_bits(
                            fields(second, 4 * nibble, 0x0F0F0F0F), fields(fifth_second, sub, 0x01010101), 4
                        ),
                        (d * to_floats((scale_word >> (8 * nibble)) & 255),),
                        (dmin * to_floats((minimum_word >> (8 * nibble)) & 255),),
                    )

    return q5_k


def make_q6_k(kind: int) -> Rows:
    """Q6_K: w = (d·scale)·(q - 32), a signed scale for every 16 values."""

    def q6_k(source: Any, stride: Any, blocks: Any, left: Any, tokens: Any, sums: Any) -> None:
        for b in range(blocks):
            p = 210 * b
            d = high_half(read_words(source, stride, p + 194)[3])
            scales = read_words(source, stride, p + 192)
            for half in range(2):
                high = read_words(source, stride, p + 128 + 32 * half)
                high_second = read_words(source, stride, p + 144 + 32 * half)
                early = scales[0] if half == 0 else scales[2]
                late = scales[1] if half == 0 else scales[3]
                for quarter in range(4):
                    prefetch_rows(27, source, stride, p + 105 * half + 26 * quarter)
                    low = p + 64 * half + 32 * (quarter & 1)
                    nibble, pair = 4 * (quarter >> 1), 2 * quarter
                    word = (early if quarter < 2 else late) >> (16 * (quarter & 1))
                    first = fields(read_words(source, stride, low), nibble, 0x0F0F0F0F)
                    second = fields(read_words(source, stride, low + 16), nibble, 0x0F0F0F0F)
                    add_block(
                        kind,
                        63,
                        32,
                        left,
                        tokens,
                        sums,
                        8 * b + 4 * half + quarter,
                        with_bits(first, fields(high, pair, 0x03030303), 4),
                        with_bits(second, fields(high_second, pair, 0x03030303), 4),
                        (d * to_floats((word << 24) >> 24), d * to_floats((word << 16) >> 24)),
                        (),
                    )

    return q6_k
