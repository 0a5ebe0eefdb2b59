"""Cross-entropy of the trained tokens.

L = −(1/N) · Σ_t w_t · log p(x_t | x_<t),    ∂L/∂log p_t = −w_t / N

with w_t the token's weight (1 for plain fine-tuning) and N the normaliser of the whole optimizer step,
so the result does not depend on how the step is cut into passes. It is the default of::

    [sft]
    loss = "cross_entropy"

Source: maximum likelihood; Goodfellow, Bengio & Courville 2016, Deep Learning, equation 5.59.
"""

from __future__ import annotations

import math

import numpy as np

from retrograd_hookspecs import (
    BuildContext,
    Component,
    Loss,
    LossBatch,
    LossResult,
    NoConfig,
    TrainingError,
    hookimpl,
)


def cross_entropy(batch: LossBatch) -> LossResult:
    """Weighted negative log-likelihood and its derivative; arrays (n,), value in nats.

    The sum is taken in float64. `metrics`: `nll` is Σ w·(−log p), `weight` is Σ w; their quotient over
    all passes is the mean loss of a token.

    Raises: `TrainingError` if the normaliser is not a positive finite number, or if the tokens have
    advantages: what the reward says would be ignored.
    """
    if "advantage" in batch.extra:
        raise TrainingError(
            'loss = "cross_entropy" knows no rewards: every answer would become more likely, good or bad;'
            " leave `loss` out, or name a loss that takes advantages (grpo, grpo_tis, cispo, ppo)"
        )
    if not (math.isfinite(batch.normalizer) and batch.normalizer > 0):
        raise TrainingError(
            f"cross_entropy: the loss is divided by {batch.normalizer!r}, which must be positive:"
            " the optimizer step holds no trained token"
        )
    nll = -float(np.dot(batch.weight.astype(np.float64), batch.logp.astype(np.float64)))
    return LossResult(
        value=nll / batch.normalizer,
        dlogp=(-batch.weight / batch.normalizer).astype(batch.logp.dtype, copy=False),
        metrics={"nll": nll, "weight": float(np.sum(batch.weight, dtype=np.float64))},
    )


def _build(config: NoConfig, context: BuildContext) -> Loss:
    return cross_entropy


@hookimpl
def retrograd_losses() -> list[Component[NoConfig, Loss]]:
    """`cross_entropy`."""
    return [
        Component(
            name="cross_entropy",
            config=NoConfig,
            build=_build,
            summary="Negative log-likelihood of the trained tokens.",
            source="Goodfellow, Bengio & Courville 2016, Deep Learning, equation 5.59",
        )
    ]
