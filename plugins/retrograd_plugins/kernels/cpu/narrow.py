"""Activations in 16 bits on the processor, where products round more than that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """Compile the kernels, or load them from Numba's cache; none where products are float32."""
    from ._simd_features import TILE_VARIANTS

    if context.service("backend").variants[0] not in TILE_VARIANTS:
        return []
    from ._math_gated_kept import (
        gated_activation_keep,
        gated_activation_kept,
        gated_activation_kept_backward,
    )
    from ._math_narrow import narrow, widen

    return [
        KernelImpl(op="gated_activation_keep", fn=gated_activation_keep, variant="numba"),
        KernelImpl(op="gated_activation_kept", fn=gated_activation_kept, variant="numba"),
        KernelImpl(op="gated_activation_kept_backward", fn=gated_activation_kept_backward, variant="numba"),
        KernelImpl(op="narrow", fn=narrow, variant="amx"),
        KernelImpl(op="widen", fn=widen, variant="amx"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.narrow`."""
    return [
        Component(
            name="cpu.narrow",
            config=NoConfig,
            build=build,
            summary="Activations kept in 16 bits for the backward pass, beside products of bfloat16.",
            needs=("backend",),
        )
    ]
