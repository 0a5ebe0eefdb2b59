"""Reference element-wise ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl

from ._rows import Array


def add_bias(x: Array, bias: Array) -> None:
    """x (T, N) += bias (N,)."""
    x += bias


def add(x: Array, out: Array) -> None:
    """out (T, K) += x."""
    out += x


def scale(factor: float, out: Array) -> None:
    """out *= factor."""
    out *= factor


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The three ops."""
    return [
        KernelImpl(op="add_bias", fn=add_bias, variant="reference"),
        KernelImpl(op="add", fn=add, variant="reference"),
        KernelImpl(op="scale", fn=scale, variant="reference"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `reference.elementwise`."""
    return [
        Component(
            name="reference.elementwise",
            config=NoConfig,
            build=build,
            summary="Bias, addition and scaling in float64.",
            needs=("backend",),
        )
    ]
