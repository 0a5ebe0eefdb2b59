"""Optimizer updates and the squared norm on the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """Compile the kernels, or load them from Numba's cache."""
    from ._math_optimizers import adamw, sgd, sum_squares

    return [
        KernelImpl(op="adamw", fn=adamw, variant="numba"),
        KernelImpl(op="sgd", fn=sgd, variant="numba"),
        KernelImpl(op="sum_squares", fn=sum_squares, variant="numba"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.optimizers`."""
    return [
        Component(
            name="cpu.optimizers",
            config=NoConfig,
            build=build,
            summary="AdamW and SGD updates in float32, the squared norm in float64.",
            source="Loshchilov & Hutter 2019, algorithms 1 and 2",
            needs=("backend",),
        )
    ]
