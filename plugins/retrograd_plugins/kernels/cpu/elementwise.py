"""Element-wise ops on the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl

Array = npt.NDArray[Any]


def add_bias(x: Array, bias: Array) -> None:
    """x (T, N) += bias (N,)."""
    np.add(x, bias, out=x)


def scale(factor: float, out: Array) -> None:
    """out *= factor."""
    np.multiply(out, np.float32(factor), out=out)


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The ops; compile the kernel, or load it from Numba's cache."""
    from ._math_elementwise import add

    return [
        KernelImpl(op="add_bias", fn=add_bias, variant="numpy"),
        KernelImpl(op="add", fn=add, variant="numba"),
        KernelImpl(op="scale", fn=scale, variant="numpy"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.elementwise`."""
    return [
        Component(
            name="cpu.elementwise",
            config=NoConfig,
            build=build,
            summary="Bias, addition and scaling; bound by memory, so only addition is worth a kernel.",
            needs=("backend",),
        )
    ]
