"""What a product is made of, for one instruction set: packing and the panel kernel.

A product C = A·B is computed panel by panel: B is a panel of decoded weights, packed for the
instruction set in sub-panels of `width` columns; A are activations, converted once a call. All four
functions take addresses and int64 (strides in float32 elements):

    convert(x, x_stride, tokens, count, a, a_stride)            tokens <= token_block
    pack(source, stride, columns, count, b, b_stride)           forward: source row j is column j of B
    pack(source, stride, count, columns, b, b_stride)           gradient: source row i is row i of B
    multiply(a, a_stride, b, b_stride, c, c_stride, tokens, columns, depth, accumulate, spare,
             more_a, more_a_stride, more_b, more_b_stride, more_depth)

`multiply` continues its sums with `more_depth` steps of a second pair of operands, which may be none. The
forward `pack` serves one sub-panel, that of gradients all of a panel, sub-panel s from b + s·b_stride.
Packing fills up to whole vectors or tiles with zeros, in the source too. `spare` is room for one tile of C
at the edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from numba import cfunc, types

from ._simd_features import TILE_VARIANTS, jit_disabled

Floats = npt.NDArray[np.float32]

PACK_SIGNATURE = types.void(*[types.int64] * 6)
MULTIPLY_SIGNATURE = types.void(*[types.int64] * 16)


@attrs.frozen(kw_only=True)
class Product:
    """The functions of one direction, compiled, and the layout they agree on."""

    convert: Any
    pack: Any
    multiply: Any
    weights_per_float: int = 1
    """Packed weights in the room of one float32: 2 for bfloat16."""
    activation_step: int
    """Twice the float32 elements of converted activations per step along the depth."""
    depth: int
    """Steps of the sum for which a panel is packed at once."""
    panel_floats: int = 0
    """float32 elements of a packed panel that stays in the second cache; 0 if it is not known."""
    decoding: int = 16
    """Tokens whose product with a weight costs as much as decoding and packing it."""
    whole_steps: bool = False
    """True if converted activations are filled up to steps of 32 along the depth."""

    def activation_stride(self, columns: int) -> int:
        """float32 elements a token takes once converted."""
        if not self.whole_steps:
            return columns
        return -(-columns // 32) * 32 // self.weights_per_float


@attrs.frozen(kw_only=True)
class Variant:
    """The products of one instruction set."""

    name: str
    forward: Product
    """X·Wᵀ, to float32's precision."""
    gradient: Product
    """dY·W."""
    precise_gradient: Product
    """As `gradient`, to float32's precision."""
    width: int
    """Columns of a sub-panel of B."""
    token_block: int
    """Tokens that are converted and multiplied together."""
    tiles: bool = False
    """True if packed columns of `forward` are AMX tiles, which `_rows` can make of 16 rows of the weight."""
    rounded: bool = False
    """True if `forward` rounds both operands to bfloat16."""


def compiled(signature: Any, function: Callable[..., Any]) -> Any:
    """A Numba `cfunc` of `function`, cached on disk; what holds it must outlive its address."""
    return cfunc(signature, cache=True)(function)


def variant(name: str) -> Variant:
    """The variant called `name`, compiling (or loading from the cache) its functions."""
    if jit_disabled():
        return python_variant()
    if name in TILE_VARIANTS:
        from ._gemm_amx import tile_variant

        return tile_variant(name)
    from ._gemm_f32 import float_variant

    return float_variant(name)


# The portable variant as it runs without the JIT: on NumPy views in place of addresses.

PYTHON_WIDTH = 8
PYTHON_BLOCK = 6


def python_variant() -> Variant:
    """The portable variant in plain Python and NumPy."""
    forward = Product(
        convert=_convert,
        pack=_pack_rows,
        multiply=_multiply,
        activation_step=2 * PYTHON_BLOCK,
        depth=512,
    )
    gradient = attrs.evolve(forward, pack=_pack_columns)
    return Variant(
        name="portable",
        forward=forward,
        gradient=gradient,
        precise_gradient=gradient,
        width=PYTHON_WIDTH,
        token_block=PYTHON_BLOCK,
    )


def _strided(flat: Floats, rows: int, columns: int, stride: int) -> Floats:
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (4 * stride, 4))


def _convert(x: Floats, x_stride: int, tokens: int, count: int, a: Floats, a_stride: int) -> None:
    _strided(a, count, tokens, PYTHON_BLOCK)[...] = _strided(x, tokens, count, x_stride).T


def _pack_rows(source: Floats, stride: int, columns: int, count: int, b: Floats, b_stride: int) -> None:
    packed = _strided(b, count, PYTHON_WIDTH, PYTHON_WIDTH)
    packed[:, columns:] = 0.0
    packed[:, :columns] = _strided(source, columns, count, stride).T


def _pack_columns(source: Floats, stride: int, count: int, columns: int, b: Floats, b_stride: int) -> None:
    values = _strided(source, count, columns, stride)
    for number, first in enumerate(range(0, columns, PYTHON_WIDTH)):
        packed = _strided(b[number * b_stride :], count, PYTHON_WIDTH, PYTHON_WIDTH)
        part = values[:, first : first + PYTHON_WIDTH]
        packed[:, part.shape[1] :] = 0.0
        packed[:, : part.shape[1]] = part


def _multiply(
    a: Floats,
    a_stride: int,
    b: Floats,
    b_stride: int,
    c: Floats,
    c_stride: int,
    tokens: int,
    columns: int,
    depth: int,
    accumulate: int,
    spare: Floats,
    more_a: Floats,
    more_a_stride: int,
    more_b: Floats,
    more_b_stride: int,
    more_depth: int,
) -> None:
    result = _strided(c, tokens, columns, c_stride)
    if not accumulate:
        result[...] = 0.0
    for first in range(0, tokens, PYTHON_BLOCK):
        block = result[first : first + PYTHON_BLOCK]
        left = _strided(a[first * a_stride :], depth, len(block), PYTHON_BLOCK)
        for number, column in enumerate(range(0, columns, PYTHON_WIDTH)):
            right = _strided(b[number * b_stride :], depth, PYTHON_WIDTH, PYTHON_WIDTH)
            part = block[:, column : column + PYTHON_WIDTH]
            for step in range(depth):
                part += left[step, :, None] * right[step, : part.shape[1]]
    if more_depth:
        more = (more_a, more_a_stride, more_b, more_b_stride)
        _multiply(*more, c, c_stride, tokens, columns, more_depth, 1, spare, *more, 0)
