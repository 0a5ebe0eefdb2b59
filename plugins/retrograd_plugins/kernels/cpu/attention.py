"""Attention over segments on the processor, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """Compile the kernels, or load them from Numba's cache."""
    from ._attention_ops import Attention, load_tile_backward, load_tile_forward
    from ._simd_features import TILE_VARIANTS, jit_disabled

    ops = Attention()
    kernels = [
        KernelImpl(op="attention", fn=ops.attention, variant="numba"),
        KernelImpl(op="attention_backward", fn=ops.attention_backward, variant="numba"),
    ]
    if set(TILE_VARIANTS) & set(context.service("backend").variants) and not jit_disabled():
        tiles = Attention(load_tile_forward, load_tile_backward)
        kernels += [
            KernelImpl(op="attention", fn=tiles.attention, priority=10, variant="amx"),
            KernelImpl(op="attention_backward", fn=tiles.attention_backward, priority=10, variant="amx"),
        ]
    return kernels


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.attention`."""
    return [
        Component(
            name="cpu.attention",
            config=NoConfig,
            build=build,
            summary="Causal, windowed, soft-capped grouped-query attention over segments, in blocks.",
            source="Dao 2023, FlashAttention-2, algorithms 1 and 2",
            needs=("backend",),
        )
    ]
