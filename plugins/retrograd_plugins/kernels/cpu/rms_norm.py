"""RMSNorm on the processor, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """Compile the kernels, or load them from Numba's cache."""
    from ._math_rms_norm import rms_norm, rms_norm_backward

    return [
        KernelImpl(op="rms_norm", fn=rms_norm, variant="numba"),
        KernelImpl(op="rms_norm_backward", fn=rms_norm_backward, variant="numba"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.rms_norm`."""
    return [
        Component(
            name="cpu.rms_norm",
            config=NoConfig,
            build=build,
            summary="RMSNorm and its gradient in float32 lanes.",
            source="Zhang & Sennrich 2019, equation 4",
            needs=("backend",),
        )
    ]
