"""Reference low-rank adapters, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl

from ._rows import Array, product_by_rows


def lora_forward(x: Array, a: Array, b: Array, scale: float, hidden: Array, out: Array) -> None:
    """hidden (T, r) = x (T, K) · aᵀ; adds scale · hidden · bᵀ to out (T, N), for a (r, K), b (N, r).

    Source: Hu et al. 2021, equation 3.
    """
    hidden[...] = product_by_rows(x, a.T)
    out += scale * product_by_rows(hidden, b.T)


def lora_backward(
    dout: Array,
    x: Array,
    hidden: Array,
    a: Array,
    b: Array,
    scale: float,
    da: Array,
    db: Array,
    dx: Array,
) -> None:
    """Add the gradients of `lora_forward` to da (r, K), db (N, r) and dx (T, K), for dout (T, N)."""
    dhidden = scale * product_by_rows(dout, b)
    da += dhidden.T @ x
    db += scale * (dout.T @ hidden)
    dx += product_by_rows(dhidden, a)


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The two ops."""
    return [
        KernelImpl(op="lora_forward", fn=lora_forward, variant="reference"),
        KernelImpl(op="lora_backward", fn=lora_backward, variant="reference"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `reference.lora`."""
    return [
        Component(
            name="reference.lora",
            config=NoConfig,
            build=build,
            summary="LoRA and its gradients in float64.",
            source="Hu et al. 2021, equation 3",
            needs=("backend",),
        )
    ]
