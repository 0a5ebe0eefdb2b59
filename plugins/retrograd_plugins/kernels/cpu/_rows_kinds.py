"""What the functions of `_rows` compile to, selected by their `kind`, and the records they work on.

- VNNI_512, VNNI_256, MADD_256: sums of products with activations rounded to 8 bits, by `vpdpbusd` on 64 or 32
  bytes, or by `vpmaddubsw` and `vpmaddwd`. Products of a block are integers, so these three agree bit for
  bit; the blocks are added in float32 in their order along the row.
- TILES: the weights in float32, as ggml computes them, stored as right operands of AMX products: their high
  halves as a tile of bfloat16, then their low halves (see `_simd_tiles.split_pairs`).
- AMX: the same tiles, multiplied with activations split likewise at once, while the next are unpacked; the
  sums stay in tile registers 0 to 3.
- AMX_HIGH: as AMX, of the high halves alone.

Source: Intel SDM, VPDPBUSD, VPMADDUBSW and TDPBF16PS; rounding in blocks of 32 as ggml's Q8_0.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ._simd import FLOATS, I64, WIDTH, function, splat

VNNI_512, VNNI_256, MADD_256, TILES, AMX, AMX_HIGH = 7, 8, 9, 12, 13, 14
"""Numba's cache knows compiled functions by these: a kind that changes its meaning takes a new number."""

MULTIPLIED = (AMX, AMX_HIGH)
"""The kinds that multiply tiles as they unpack them."""

BLOCK = 32
"""Activations that share a scale."""
RECORD = 48
"""Bytes of a block of rounded activations: 32 int8, their scale, the sums of all, of the first 16 and of
the last 16 (see `round_block`)."""
SCALE_AT, SUM_AT, FIRST_SUM_AT = 32, 36, 40
SIGNED_BIAS = 128
"""Bias of quants that are signed bytes, stored with the top bit flipped."""
WHOLE = 12582912
"""1.5 · 2^23, where sums of products begin: the bits of its float32 and an integer n of up to 22 bits, added
and read as float32, are WHOLE + n, so that no sum has to be converted."""
WHOLE_BITS = 0x4B400000
"""The float32 of WHOLE, as an integer."""
FLOAT_BLOCK = 8
"""Float activations of a block of formats without quants."""
FLOAT_RECORD = 4 * FLOAT_BLOCK
TILE_BYTES = 1024
TILE_PAIR = 2 * TILE_BYTES
"""The tiles of high and low halves."""
MOST_TILES = 4
"""Tiles of 16 tokens whose sums stay in registers."""
STEP_BYTES = 2 * TILE_PAIR
"""A step of 32 along the depth of an AMX panel of 32 columns."""


def place_of(builder: Any, base: Any, offset: int, kind: Any) -> Any:
    """`base` + `offset` bytes as a pointer to `kind`."""
    address = builder.add(base, ir.Constant(I64, offset)) if offset else base
    return builder.inttoptr(address, kind.as_pointer())


def broadcast(builder: Any, base: Any, offset: int, kind: Any) -> Any:
    """The value at `base` + `offset` bytes in every lane."""
    return splat(builder, builder.load(place_of(builder, base, offset, kind), align=4))


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z of float lanes, rounded once."""
    kind = FLOATS.llvm
    return builder.call(function(builder, f"llvm.fma.v{WIDTH}f32", kind, [kind] * 3), [x, y, z])
