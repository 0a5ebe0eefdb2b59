"""Low-rank adapters on the processor, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """Compile the kernels, or load them from Numba's cache."""
    from ._math_lora import lora_backward, lora_forward

    return [
        KernelImpl(op="lora_forward", fn=lora_forward, variant="numba"),
        KernelImpl(op="lora_backward", fn=lora_backward, variant="numba"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.lora`."""
    return [
        Component(
            name="cpu.lora",
            config=NoConfig,
            build=build,
            summary="LoRA of any rank and its gradients in float32 register tiles.",
            source="Hu et al. 2021, equation 3",
            needs=("backend",),
        )
    ]
