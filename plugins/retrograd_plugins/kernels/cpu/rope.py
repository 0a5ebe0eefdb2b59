"""Rotary position embedding on the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """Compile the kernels, or load them from Numba's cache."""
    from ._math_rope import rope

    return [
        KernelImpl(op="rope", fn=rope, variant="numba"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.rope`."""
    return [
        Component(
            name="cpu.rope",
            config=NoConfig,
            build=build,
            summary="Rotary position embedding in float32.",
            source="Su et al. 2021, equation 34",
            needs=("backend",),
        )
    ]
