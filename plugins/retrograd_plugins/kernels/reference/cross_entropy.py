"""Reference cross-entropy over tiles of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl

from ._rows import Array


def logsumexp_tile(
    logits: Array,
    first: int,
    targets: Array,
    softcap: float,
    running_max: Array,
    running_sum: Array,
    target_logit: Array,
) -> None:
    """Fold vocabulary entries [first, first + V') into the running logsumexp of each row.

    logits (T, V') are capped in place if softcap > 0; `running_max` (T,) starts at −inf and
    `running_sum` (T,) at 0; `target_logit` (T,) is set where `targets` int32 (T,) lie in the tile.
    Afterwards logsumexp = running_max + log(running_sum).

    Source: Milakov & Gimelshein 2018, algorithm 3.
    """
    if softcap > 0.0:
        logits[...] = softcap * np.tanh(logits / softcap)
    highest = np.maximum(running_max, logits.max(axis=1))
    # A row of −inf alone has nothing to sum: subtract 0 there, not −inf from −inf.
    shift = np.where(np.isneginf(highest), 0.0, highest)
    running_sum *= np.exp(running_max - shift)
    running_sum += np.exp(logits - shift[:, None]).sum(axis=1)
    running_max[...] = highest
    rows = np.flatnonzero((targets >= first) & (targets < first + logits.shape[1]))
    target_logit[rows] = logits[rows, targets[rows] - first]


def softmax_grad_tile(
    logits: Array, first: int, targets: Array, softcap: float, lse: Array, dlogp: Array
) -> None:
    """Overwrite uncapped logits (T, V') by dlogp · (onehot(target) − softmax), taken back through the cap.

    That is the gradient by the logits of Σ dlogp · log p(target), for `lse` and `dlogp` (T,).
    """
    capped = softcap * np.tanh(logits / softcap) if softcap > 0.0 else logits
    gradient = -np.exp(capped - lse[:, None])
    rows = np.flatnonzero((targets >= first) & (targets < first + logits.shape[1]))
    gradient[rows, targets[rows] - first] += 1.0
    gradient *= dlogp[:, None]
    if softcap > 0.0:
        gradient *= 1.0 - (capped / softcap) ** 2
    logits[...] = gradient


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The two ops."""
    return [
        KernelImpl(op="logsumexp_tile", fn=logsumexp_tile, variant="reference"),
        KernelImpl(op="softmax_grad_tile", fn=softmax_grad_tile, variant="reference"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `reference.cross_entropy`."""
    return [
        Component(
            name="reference.cross_entropy",
            config=NoConfig,
            build=build,
            summary="Running logsumexp and its gradient, a vocabulary tile at a time, in float64.",
            source="Milakov & Gimelshein 2018, algorithm 3",
            needs=("backend",),
        )
    ]
