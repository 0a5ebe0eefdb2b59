"""Decoders of the K-quants: super-blocks of 256 values, with sub-blocks that have scales of their own.

Signature and conventions are those of `_decode_legacy`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ._simd import read_bytes, read_half, to_floats, write_floats


@njit
def q2_k(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q2_K, 84 bytes: 16 scale/minimum nibbles, 64 bytes of quants, d, dmin.

    w = (d·scale)·q - dmin·minimum, a scale for every 16 values; byte l of each 32 bytes holds
    quants l, l + 32, l + 64, l + 96.
    """
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 84 * b, r * target_stride + 256 * b
            d, dmin = read_half(source, p + 80), read_half(source, p + 82)
            for half in range(2):
                for side in range(2):
                    packed = read_bytes(source, p + 16 + 32 * half + 16 * side)
                    for shift in range(4):
                        sub = 8 * half + 2 * shift + side
                        scales = int(source[p + sub])
                        scale = d * np.float32(scales & 15)
                        minimum = dmin * np.float32(scales >> 4)
                        q = to_floats((packed >> (2 * shift)) & 3)
                        write_floats(target, o + 16 * sub, q * scale - minimum)


@njit
def _q3_scale(source: Any, p: Any, sub: Any) -> Any:
    """6-bit scale `sub` of the 12 bytes at `p`: low nibbles in bytes 0-7, high pairs of bits in 8-11."""
    low = (int(source[p + sub % 8]) >> (4 * (sub // 8))) & 15
    high = (int(source[p + 8 + sub % 4]) >> (2 * (sub // 4))) & 3
    return (low | (high << 4)) - 32


@njit
def q3_k(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q3_K, 110 bytes: 32 bytes of third bits, 64 bytes of quants, 12 bytes of scales, d.

    w = (d·(scale - 32))·(q - 4·[third bit is 0]).
    """
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 110 * b, r * target_stride + 256 * b
            d = read_half(source, p + 108)
            for half in range(2):
                for side in range(2):
                    packed = read_bytes(source, p + 32 + 32 * half + 16 * side)
                    third = read_bytes(source, p + 16 * side)
                    for shift in range(4):
                        sub = 8 * half + 2 * shift + side
                        scale = d * np.float32(_q3_scale(source, p + 96, sub))
                        bit = (third >> (4 * half + shift)) & 1
                        q = (((packed >> (2 * shift)) & 3) | (bit << 2)) - 4
                        write_floats(target, o + 16 * sub, to_floats(q) * scale)


@njit
def _scale(source: Any, p: Any, sub: Any) -> Any:
    """6-bit scale `sub` of the 12 bytes of scales and minima at `p` (Q4_K, Q5_K)."""
    if sub < 4:
        return int(source[p + sub]) & 63
    return (int(source[p + sub + 4]) & 15) | ((int(source[p + sub - 4]) >> 6) << 4)


@njit
def _minimum(source: Any, p: Any, sub: Any) -> Any:
    """6-bit minimum `sub` of the 12 bytes of scales and minima at `p` (Q4_K, Q5_K)."""
    if sub < 4:
        return int(source[p + sub + 4]) & 63
    return (int(source[p + sub + 4]) >> 4) | ((int(source[p + sub]) >> 6) << 4)


@njit
def q4_k(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q4_K, 144 bytes: d, dmin, 12 bytes of scales and minima, 128 bytes of quants.

    w = (d·scale)·q - dmin·minimum, a scale for every 32 values; byte l of each 32 bytes holds
    quants l and l + 32.
    """
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 144 * b, r * target_stride + 256 * b
            d, dmin = read_half(source, p), read_half(source, p + 2)
            for pair in range(4):
                first = read_bytes(source, p + 16 + 32 * pair)
                second = read_bytes(source, p + 32 + 32 * pair)
                for nibble in range(2):
                    sub = 2 * pair + nibble
                    scale = d * np.float32(_scale(source, p + 4, sub))
                    minimum = dmin * np.float32(_minimum(source, p + 4, sub))
                    low = to_floats((first >> (4 * nibble)) & 15)
                    high = to_floats((second >> (4 * nibble)) & 15)
                    write_floats(target, o + 32 * sub, low * scale - minimum)
                    write_floats(target, o + 32 * sub + 16, high * scale - minimum)


@njit
def q5_k(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q5_K, 176 bytes: d, dmin, 12 bytes of scales and minima, 32 bytes of fifth bits, 128 of quants."""
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 176 * b, r * target_stride + 256 * b
            d, dmin = read_half(source, p), read_half(source, p + 2)
            fifth_low, fifth_high = read_bytes(source, p + 16), read_bytes(source, p + 32)
            for pair in range(4):
                first = read_bytes(source, p + 48 + 32 * pair)
                second = read_bytes(source, p + 64 + 32 * pair)
                for nibble in range(2):
                    sub = 2 * pair + nibble
                    scale = d * np.float32(_scale(source, p + 4, sub))
                    minimum = dmin * np.float32(_minimum(source, p + 4, sub))
                    low = ((first >> (4 * nibble)) & 15) | (((fifth_low >> sub) & 1) << 4)
                    high = ((second >> (4 * nibble)) & 15) | (((fifth_high >> sub) & 1) << 4)
                    write_floats(target, o + 32 * sub, to_floats(low) * scale - minimum)
                    write_floats(target, o + 32 * sub + 16, to_floats(high) * scale - minimum)


@njit
def _signed(byte: Any) -> Any:
    """A byte as a signed number."""
    value = int(byte)
    return value - ((value & 128) << 1)


@njit
def q6_k(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """Q6_K, 210 bytes: 128 bytes of low nibbles, 64 of high pairs of bits, 16 signed scales, d.

    w = (d·scale)·(q - 32), a scale for every 16 values; in each half of 128 values, nibble byte l
    holds values l and l + 64, and byte l of the high bits values l, l + 32, l + 64, l + 96.
    """
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 210 * b, r * target_stride + 256 * b
            d = read_half(source, p + 208)
            for half in range(2):
                for part in range(2):
                    high = read_bytes(source, p + 128 + 32 * half + 16 * part)
                    for quarter in range(4):
                        low = read_bytes(source, p + 64 * half + 32 * (quarter % 2) + 16 * part)
                        sub = 8 * half + 2 * quarter + part
                        scale = d * np.float32(_signed(source[p + 192 + sub]))
                        nibbles = (low >> (4 * (quarter // 2))) & 15
                        q = nibbles | (((high >> (2 * quarter)) & 3) << 4)
                        write_floats(target, o + 16 * sub, to_floats(q - 32) * scale)
