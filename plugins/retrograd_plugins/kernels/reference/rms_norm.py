"""Reference RMSNorm, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl

from ._rows import Array


def rms_norm(x: Array, weight: Array, eps: float, out: Array, rstd: Array) -> None:
    """out (T, K) = x · rstd · weight, rstd (T,) = 1 / sqrt(mean(x²) + eps).

    Source: Zhang & Sennrich 2019, equation 4.
    """
    rstd[...] = 1.0 / np.sqrt(np.mean(x * x, axis=1) + eps)
    out[...] = x * rstd[:, None] * weight


def rms_norm_backward(dout: Array, x: Array, weight: Array, rstd: Array, dx: Array, accumulate: bool) -> None:
    """Gradient of `rms_norm` by x: with x̂ = x·rstd and g = dout·weight, dx = rstd·(g − x̂·mean(g·x̂))."""
    normalised = x * rstd[:, None]
    scaled = dout * weight
    mean = np.mean(scaled * normalised, axis=1, keepdims=True)
    gradient = rstd[:, None] * (scaled - normalised * mean)
    if accumulate:
        dx += gradient
    else:
        dx[...] = gradient


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The two ops."""
    return [
        KernelImpl(op="rms_norm", fn=rms_norm, variant="reference"),
        KernelImpl(op="rms_norm_backward", fn=rms_norm_backward, variant="reference"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `reference.rms_norm`."""
    return [
        Component(
            name="reference.rms_norm",
            config=NoConfig,
            build=build,
            summary="RMSNorm and its gradient in float64.",
            source="Zhang & Sennrich 2019, equation 4",
            needs=("backend",),
        )
    ]
