"""Cross-entropy over tiles of the vocabulary on the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """Compile the kernels, or load them from Numba's cache."""
    from ._math_cross_entropy import logsumexp_tile, softmax_grad_tile

    return [
        KernelImpl(op="logsumexp_tile", fn=logsumexp_tile, variant="numba"),
        KernelImpl(op="softmax_grad_tile", fn=softmax_grad_tile, variant="numba"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.cross_entropy`."""
    return [
        Component(
            name="cpu.cross_entropy",
            config=NoConfig,
            build=build,
            summary="Running logsumexp and its gradient, a vocabulary tile at a time.",
            source="Milakov & Gimelshein 2018, algorithm 3",
            needs=("backend",),
        )
    ]
