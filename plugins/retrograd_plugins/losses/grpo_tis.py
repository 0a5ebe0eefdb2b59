"""GRPO corrected for a sampler whose probabilities differ from those of the training path.

L = (1/N) · Σ_t w_t · [ β·k3(log π_ref − log π) − c_t·min(r_t·A_t, clip(r_t, 1 − ε_low, 1 + ε_high)·A_t) ]
c_t = min(π_old / π_sampler, C)

A fast sampler (16-bit, another order of sums) draws from a slightly different policy; c_t makes the gradient
that of the policy which is trained. It is a constant for the derivative. C bounds its variance::

    [grpo]
    loss = "grpo_tis"

    [loss.grpo_tis]
    cap = 2.0
    beyond_cap = "truncate"

`beyond_cap = "mask"` gives tokens above the cap no policy gradient at all (their KL penalty stays).

Sources: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (truncated
importance sampling); Liu et al. 2025, When Speed Kills Stability (masked importance sampling).
"""

from __future__ import annotations

from typing import Literal

import attrs
import numpy as np

from retrograd.policy_losses import (
    PolicyTokens,
    beyond_cap,
    clip_counts,
    clipped_surrogate,
    reference_penalty,
    sampler_weight,
)
from retrograd_hookspecs import BuildContext, Component, Loss, LossBatch, LossResult, hookimpl, key


@attrs.frozen(kw_only=True)
class GrpoTisConfig:
    """Keys of `[loss.grpo_tis]`."""

    cap: float = key(
        2.0, minimum=1.0, doc="Largest importance weight C of a token, training path to sampler."
    )
    beyond_cap: Literal["truncate", "mask"] = key(
        "truncate", doc="`truncate` gives a token above the cap the weight `cap`, `mask` gives it 0."
    )


@attrs.frozen
class GrpoTis:
    """The loss with its cap."""

    config: GrpoTisConfig

    def __call__(self, batch: LossBatch) -> LossResult:
        """Value in nats and derivative (n,). Reads `extra["sampled_logp"]` too.

        `metrics` adds `importance_weight` (Σ c) and `importance_capped` (tokens above the cap).

        Raises: `TrainingError` as `PolicyTokens.of`, and without `ref_logp` where β is positive.
        """
        tokens = PolicyTokens.of(batch, "grpo_tis")
        weight, capped = sampler_weight(tokens, self.config.cap), beyond_cap(tokens, self.config.cap)
        if self.config.beyond_cap == "mask":
            weight = np.where(capped, 0.0, weight)
        counts = {"importance_weight": tokens.total(weight), "importance_capped": tokens.total(capped)}
        return tokens.result(
            reference_penalty(tokens) - weight * clipped_surrogate(tokens), clip_counts(tokens) | counts
        )


def _build(config: GrpoTisConfig, context: BuildContext) -> Loss:
    return GrpoTis(config)


@hookimpl
def retrograd_losses() -> list[Component[GrpoTisConfig, Loss]]:
    """`grpo_tis`."""
    return [
        Component(
            name="grpo_tis",
            config=GrpoTisConfig,
            build=_build,
            summary="GRPO with a capped importance weight from the sampler to the training path.",
            source="Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
        )
    ]
