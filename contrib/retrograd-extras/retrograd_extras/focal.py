"""Focal loss over the trained tokens: easy tokens count less.

L = −Σ w·(1 − p)^γ·log p / N, with p the probability of the target::

    [sft]
    loss = "focal"

    [loss.focal]
    gamma = 2.0
"""

from __future__ import annotations

import attrs

from retrograd_hookspecs import (
    BuildContext,
    Component,
    Loss,
    LossBatch,
    LossResult,
    hookimpl,
    key,
)


@attrs.frozen(kw_only=True)
class FocalConfig:
    """Keys of `[loss.focal]`."""

    gamma: float = key(2.0, minimum=0.0, doc="Focusing exponent; 0 is cross-entropy.")


class FocalLoss:
    """The derivative by log p is −w·(1 − p)^γ·(1 − γ·p·log p / (1 − p)) / N."""

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma

    def __call__(self, batch: LossBatch) -> LossResult:
        """Value and derivative; arrays (n,)."""
        import numpy as np

        logp = batch.logp
        p = np.exp(logp)
        rest = np.maximum(1 - p, np.finfo(logp.dtype).tiny)
        focus = rest**self._gamma
        scale = batch.weight / batch.normalizer
        return LossResult(
            value=float(-np.sum(scale * focus * logp, dtype=np.float64)),
            dlogp=-scale * focus * (1 - self._gamma * p * logp / rest),
        )


def _build(config: FocalConfig, context: BuildContext) -> Loss:
    return FocalLoss(config.gamma)


@hookimpl
def retrograd_losses() -> list[Component[FocalConfig, Loss]]:
    """`focal`."""
    return [
        Component(
            name="focal",
            config=FocalConfig,
            build=_build,
            summary="Cross-entropy that counts easy tokens less.",
            source="Lin et al. 2017, Focal Loss for Dense Object Detection, equation 4",
        )
    ]
