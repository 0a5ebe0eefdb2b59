"""Reference optimizer updates and the squared norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrograd_hookspecs import BuildContext, Component, KernelError, KernelImpl, NoConfig, hookimpl

from ._rows import Array


def adamw(
    value: Array,
    grad: Array,
    first_moment: Array,
    second_moment: Array,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One AdamW update of float32 value and moments in place; `step` counts from 1.

    Differs from the paper in that lr also multiplies the weight decay, as is usual.

    Raises:
        KernelError: step < 1.

    Source: Loshchilov & Hutter 2019, algorithm 2.
    """
    if step < 1:
        raise KernelError(f"adamw: step {step} is not positive; count optimizer steps from 1")
    gradient = grad.astype(np.float64)
    first = beta1 * first_moment.astype(np.float64) + (1.0 - beta1) * gradient
    second = beta2 * second_moment.astype(np.float64) + (1.0 - beta2) * gradient * gradient
    direction = (first / (1.0 - beta1**step)) / (np.sqrt(second / (1.0 - beta2**step)) + eps)
    current = value.astype(np.float64)
    value[...] = current - lr * (direction + weight_decay * current)
    first_moment[...] = first
    second_moment[...] = second


def sgd(
    value: Array, grad: Array, momentum_buffer: Array, lr: float, momentum: float, weight_decay: float
) -> None:
    """One SGD update in place, with buffer = momentum · buffer + grad.

    value −= lr · (buffer + weight_decay · value).

    The weight decay is decoupled: it does not enter the buffer.

    Source: Loshchilov & Hutter 2019, algorithm 1.
    """
    buffer = momentum * momentum_buffer.astype(np.float64) + grad
    current = value.astype(np.float64)
    value[...] = current - lr * (buffer + weight_decay * current)
    momentum_buffer[...] = buffer


def sum_squares(x: Array) -> float:
    """Σ x² of a 1-D array in float64, in NumPy's pairwise order."""
    wide = x.astype(np.float64)
    return float(np.sum(wide * wide))


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The three ops."""
    return [
        KernelImpl(op="adamw", fn=adamw, variant="reference"),
        KernelImpl(op="sgd", fn=sgd, variant="reference"),
        KernelImpl(op="sum_squares", fn=sum_squares, variant="reference"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `reference.optimizers`."""
    return [
        Component(
            name="reference.optimizers",
            config=NoConfig,
            build=build,
            summary="AdamW, SGD and the squared norm, computed in float64 on float32 arrays.",
            source="Loshchilov & Hutter 2019, algorithms 1 and 2",
            needs=("backend",),
        )
    ]
