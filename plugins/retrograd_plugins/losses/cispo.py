"""CISPO: REINFORCE whose importance weights are clipped, so that no token loses its gradient.

L = (1/N) · Σ_t w_t · [ β·k3(log π_ref − log π) − sg(min(r_t, 1 + ε_high))·A_t·log π_t ]

where sg is a constant for the derivative. The clip bounds the weight of a token; in GRPO it removes the
token. The paper leaves the ratio open below, and so does the default::

    [grpo]
    loss = "cispo"
    clip_range_high = 4.0

    [loss.cispo]
    clip_low = false

N is the algorithm's divisor (for grpo a constant), where the paper divides by the tokens of the batch.
`value` is the expression above; its size says little, its derivative is that of the objective.

Source: MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5.
"""

from __future__ import annotations

import math

import attrs

from retrograd.policy_losses import PolicyTokens, clip, reference_penalty, stop_gradient
from retrograd_hookspecs import BuildContext, Component, Loss, LossBatch, LossResult, hookimpl, key


@attrs.frozen(kw_only=True)
class CispoConfig:
    """Keys of `[loss.cispo]`."""

    clip_low: bool = key(
        False,
        doc="Also raise ratios below 1 − clip_range_low to that bound; the paper leaves them as they are.",
    )


@attrs.frozen
class Cispo:
    """The loss; `config` says whether the ratio is bounded below."""

    config: CispoConfig

    def __call__(self, batch: LossBatch) -> LossResult:
        """Value in nats and derivative (n,).

        `metrics`: `clipped_low` and `clipped_high` count tokens whose weight the clip changed.

        Raises: `TrainingError` as `PolicyTokens.of`, and without `ref_logp` where β is positive.
        """
        tokens = PolicyTokens.of(batch, "cispo")
        lowest = tokens.lowest if self.config.clip_low else -math.inf
        weight = stop_gradient(clip(tokens.ratio, lowest, tokens.highest))
        surrogate = weight * tokens.advantage * tokens.logp
        ratio = tokens.ratio.value
        clipped = {
            "clipped_low": tokens.total(ratio < lowest),
            "clipped_high": tokens.total(ratio > tokens.highest),
        }
        return tokens.result(reference_penalty(tokens) - surrogate, clipped)


def _build(config: CispoConfig, context: BuildContext) -> Loss:
    return Cispo(config)


@hookimpl
def retrograd_losses() -> list[Component[CispoConfig, Loss]]:
    """`cispo`."""
    return [
        Component(
            name="cispo",
            config=CispoConfig,
            build=_build,
            summary="Policy gradient with clipped importance weights: no token loses its gradient.",
            source="MiniMax 2025, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5",
        )
    ]
