"""Decoders of formats whose 4-bit quants index a table of values: IQ4_NL, IQ4_XS, MXFP4.

Signature and conventions are those of `_decode_legacy`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ._simd import make_codebook, read_bytes, read_exponent, read_half, write_floats

iq4_values = make_codebook((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
"""Non-linear 4-bit grid of the IQ4 formats."""
e2m1_values = make_codebook((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
"""Twice the E2M1 floats of the OCP Microscaling formats; the block scale is half of what E8M0 says."""


@njit
def iq4_nl(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """IQ4_NL, 18 bytes: scale d, 16 bytes of index pairs (j, j + 16)."""
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 18 * b, r * target_stride + 32 * b
            d = read_half(source, p)
            q = read_bytes(source, p + 2)
            write_floats(target, o, iq4_values(q & 15) * d)
            write_floats(target, o + 16, iq4_values(q >> 4) * d)


@njit
def iq4_xs(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """IQ4_XS, 136 bytes: d, 16 bits of high scale bits, 4 bytes of low scale nibbles, 128 of indices."""
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 136 * b, r * target_stride + 256 * b
            d = read_half(source, p)
            high = int(source[p + 2]) | (int(source[p + 3]) << 8)
            for sub in range(8):
                low = (int(source[p + 4 + sub // 2]) >> (4 * (sub % 2))) & 15
                scale = d * np.float32((low | (((high >> (2 * sub)) & 3) << 4)) - 32)
                q = read_bytes(source, p + 8 + 16 * sub)
                write_floats(target, o + 32 * sub, iq4_values(q & 15) * scale)
                write_floats(target, o + 32 * sub + 16, iq4_values(q >> 4) * scale)


@njit
def mxfp4(source: Any, source_stride: Any, rows: Any, blocks: Any, target: Any, target_stride: Any) -> None:
    """MXFP4, 17 bytes: an E8M0 scale, 16 bytes of E2M1 pairs (j, j + 16).

    Source: OCP Microscaling Formats specification v1.0.
    """
    for r in range(rows):
        for b in range(blocks):
            p, o = r * source_stride + 17 * b, r * target_stride + 32 * b
            d = read_exponent(source, p)
            q = read_bytes(source, p + 1)
            write_floats(target, o, e2m1_values(q & 15) * d)
            write_floats(target, o + 16, e2m1_values(q >> 4) * d)
