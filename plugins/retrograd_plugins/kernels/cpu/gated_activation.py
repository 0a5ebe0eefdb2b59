"""Gated activations on the processor, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """Compile the kernels, or load them from Numba's cache."""
    from ._math_gated import gated_activation, gated_activation_backward

    return [
        KernelImpl(op="gated_activation", fn=gated_activation, variant="numba"),
        KernelImpl(op="gated_activation_backward", fn=gated_activation_backward, variant="numba"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.gated_activation`."""
    return [
        Component(
            name="cpu.gated_activation",
            config=NoConfig,
            build=build,
            summary="SiLU and tanh-GELU gates and their gradients in float32 lanes.",
            source="Shazeer 2020, equation 6",
            needs=("backend",),
        )
    ]
