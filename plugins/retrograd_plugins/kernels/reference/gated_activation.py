"""Reference gated activations (SwiGLU, GeGLU), forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrograd_hookspecs import BuildContext, Component, KernelError, KernelImpl, NoConfig, hookimpl

from ._rows import Array

SQRT_2_OVER_PI = float(np.sqrt(2.0 / np.pi))
GELU_CUBIC = 0.044715


def activation_and_slope(kind: str, x: Array) -> tuple[Array, Array]:
    """act(x) and its derivative.

    Raises:
        KernelError: `kind` is neither "silu" nor "gelu_tanh".

    Source: Elfwing et al. 2018 (SiLU); Hendrycks & Gimpel 2016, section 2 (GELU, tanh form).
    """
    if kind == "silu":
        sigmoid = 0.5 * (1.0 + np.tanh(0.5 * x))
        return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))
    if kind == "gelu_tanh":
        tanh = np.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x**3))
        inner_slope = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * x * x)
        return 0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner_slope
    raise KernelError(f"gated_activation: unknown kind {kind!r}; known: silu, gelu_tanh")


def gated_activation(kind: str, gate: Array, up: Array, out: Array) -> None:
    """out (T, K) = act(gate) · up.

    Source: Shazeer 2020, equation 6.
    """
    out[...] = activation_and_slope(kind, gate)[0] * up


def gated_activation_backward(
    kind: str, dout: Array, gate: Array, up: Array, dgate: Array, dup: Array
) -> None:
    """dgate = dout · up · act'(gate), dup = dout · act(gate); dgate may be gate and dup may be up."""
    activated, slope = activation_and_slope(kind, gate)
    gate_gradient = dout * up * slope
    dup[...] = dout * activated
    dgate[...] = gate_gradient


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The two ops."""
    return [
        KernelImpl(op="gated_activation", fn=gated_activation, variant="reference"),
        KernelImpl(op="gated_activation_backward", fn=gated_activation_backward, variant="reference"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `reference.gated_activation`."""
    return [
        Component(
            name="reference.gated_activation",
            config=NoConfig,
            build=build,
            summary="SiLU and tanh-GELU gates in float64.",
            source="Shazeer 2020, equation 6",
            needs=("backend",),
        )
    ]
