"""Reference rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelError, KernelImpl, NoConfig, hookimpl

from ._rows import Array


def rope(x: Array, positions: Array, cos: Array, sin: Array, interleaved: bool, inverse: bool) -> None:
    """Rotate the first R of the D values of each head of x (T, heads, D) in place.

    `positions` int32 (T,) index the rows of cos and sin (P, R/2). Pairs are (2i, 2i+1) if
    `interleaved`, else (i, i + R/2). `inverse` rotates back, which is also the gradient.

    Raises:
        KernelError: a position has no row in `cos`.

    Source: Su et al. 2021, equation 34.
    """
    if positions.size and not (positions.min() >= 0 and positions.max() < cos.shape[0]):
        raise KernelError(
            f"positions range over [{positions.min()}, {positions.max()}] but the rotation table has"
            f" {cos.shape[0]} rows: the sequence is longer than the context the run was built for"
        )
    half = cos.shape[1]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    c = cos[positions][:, None, :]
    s = -sin[positions][:, None, :] if inverse else sin[positions][:, None, :]
    rotated = first * c - second * s
    second[...] = first * s + second * c
    first[...] = rotated


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The op."""
    return [
        KernelImpl(op="rope", fn=rope, variant="reference"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `reference.rope`."""
    return [
        Component(
            name="reference.rope",
            config=NoConfig,
            build=build,
            summary="Rotary position embedding in float64.",
            source="Su et al. 2021, equation 34",
            needs=("backend",),
        )
    ]
