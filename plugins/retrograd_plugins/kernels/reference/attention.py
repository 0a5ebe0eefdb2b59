"""Reference attention over segments, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl

from ._rows import Array


def visible_keys(segment: Array, i: int, window: int) -> Array:
    """Rows of k and v that query i of a segment sees, in the order of their positions."""
    _, _, context_start, context_length, key_start = (int(value) for value in segment)
    context = np.arange(context_start, context_start + context_length)
    own = np.arange(key_start, key_start + i + 1)
    rows = np.concatenate([context, own])
    return rows[-window:] if window > 0 else rows


def attention_probabilities(
    q: Array, keys: Array, scale: float, softcap: float
) -> tuple[Array, Array, Array]:
    """Softmax of one query q (H, D) over keys (n, G, D).

    Returns:
        Probabilities (G, H/G, n), logsumexp of the scores (G, H/G), and the slope d(capped)/d(raw
        score) (G, H/G, n).
    """
    groups = keys.shape[1]
    grouped = q.reshape(groups, -1, q.shape[1])
    scores = np.einsum("grd,ngd->grn", grouped, keys) * scale
    slope = np.ones_like(scores)
    if softcap > 0.0:
        tanh = np.tanh(scores / softcap)
        scores = softcap * tanh
        slope = 1.0 - tanh * tanh
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / total, (highest + np.log(total))[..., 0], slope


def attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    scale: float,
    window: int,
    softcap: float,
    out: Array,
    lse: Array,
) -> None:
    """Attention of q (T, H, D) over k, v (M, G, D) by `segments` into out (T, H, D) and lse (T, H).

    Rows of q in no segment get out = 0 and lse = −inf.

    Source: Vaswani et al. 2017, equation 1; Ainslie et al. 2023 (grouped queries); Gemma 2 report,
    section 2 (soft cap).
    """
    out[...] = 0.0
    lse[...] = -np.inf
    for segment in segments:
        for i in range(int(segment[1])):
            row = int(segment[0]) + i
            keys = visible_keys(segment, i, window)
            weights, row_lse, _ = attention_probabilities(q[row], k[keys], scale, softcap)
            out[row] = np.einsum("grn,ngd->grd", weights, v[keys]).reshape(out[row].shape)
            lse[row] = row_lse.reshape(-1)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    segments: Array,
    scale: float,
    window: int,
    softcap: float,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Gradients of `attention`: overwrites dq (T, H, D), adds to dk and dv (M, G, D).

    With p the probabilities and dp = dout · v: dv = pᵀ·dout; ds = p · (dp − Σ p·dp), times the slope of
    the cap; dq = scale · ds · k; dk = scale · dsᵀ · q. `out` and `lse` are recomputed here, not read.

    Source: Dao et al. 2022, appendix B.2.
    """
    dq[...] = 0.0
    for segment in segments:
        for i in range(int(segment[1])):
            row = int(segment[0]) + i
            keys = visible_keys(segment, i, window)
            weights, _, slope = attention_probabilities(q[row], k[keys], scale, softcap)
            grouped_q = q[row].reshape(k.shape[1], -1, q.shape[2])
            grouped_dout = dout[row].reshape(grouped_q.shape)
            dweights = np.einsum("grd,ngd->grn", grouped_dout, v[keys])
            mean = np.sum(weights * dweights, axis=-1, keepdims=True)
            dscores = scale * weights * (dweights - mean) * slope
            dq[row] = np.einsum("grn,ngd->grd", dscores, k[keys]).reshape(dq[row].shape)
            dk[keys] += np.einsum("grn,grd->ngd", dscores, grouped_q)
            dv[keys] += np.einsum("grn,grd->ngd", weights, grouped_dout)


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The two ops."""
    return [
        KernelImpl(op="attention", fn=attention, variant="reference"),
        KernelImpl(op="attention_backward", fn=attention_backward, variant="reference"),
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `reference.attention`."""
    return [
        Component(
            name="reference.attention",
            config=NoConfig,
            build=build,
            summary="Causal, windowed, soft-capped grouped-query attention over segments in float64.",
            source="Vaswani et al. 2017, equation 1; Dao et al. 2022",
            needs=("backend",),
        )
    ]
