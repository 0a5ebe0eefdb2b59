"""SAPO: a soft gate in place of GRPO's clip.

L = (1/N) · Σ_t w_t · [ β·k3(log π_ref − log π) − (4/τ)·σ(τ·(r_t − 1))·A_t ]

with τ = τ_positive where A_t > 0, else τ_negative. The gradient of a token fades smoothly as its ratio leaves
1, faster with a larger τ, and equals GRPO's at a ratio of 1::

    [grpo]
    loss = "sapo"

    [loss.sapo]
    tau_positive = 1.0
    tau_negative = 1.05

The clip range is not read. N is the algorithm's divisor (for grpo a constant), where the paper takes the mean
over each answer and then over answers.

Source: Gao et al. 2025, Soft Adaptive Policy Optimization (arXiv:2511.20347).
"""

from __future__ import annotations

import attrs
import numpy as np

from retrograd.policy_losses import PolicyTokens, reference_penalty
from retrograd_hookspecs import BuildContext, Component, Loss, LossBatch, LossResult, hookimpl, key


@attrs.frozen(kw_only=True)
class SapoConfig:
    """Keys of `[loss.sapo]`."""

    tau_positive: float = key(1.0, above=0.0, doc="Temperature τ of tokens with a positive advantage.")
    tau_negative: float = key(1.05, above=0.0, doc="Temperature τ of all other tokens.")


@attrs.frozen
class Sapo:
    """The loss with its temperatures."""

    config: SapoConfig

    def __call__(self, batch: LossBatch) -> LossResult:
        """Value in nats and derivative (n,)."""
        tokens = PolicyTokens.of(batch, "sapo")
        tau = np.where(tokens.advantage > 0, self.config.tau_positive, self.config.tau_negative)
        # tanh cannot overflow: σ(x) = (1 + tanh(x/2)) / 2.
        gate = 0.5 * (1.0 + np.tanh(0.5 * tau * (tokens.ratio.value - 1.0)))
        soft = tokens.ratio.chain(4.0 / tau * gate, 4.0 * gate * (1.0 - gate))
        return tokens.result(reference_penalty(tokens) - soft * tokens.advantage)


def _build(config: SapoConfig, context: BuildContext) -> Loss:
    return Sapo(config)


@hookimpl
def retrograd_losses() -> list[Component[SapoConfig, Loss]]:
    """`sapo`."""
    return [
        Component(
            name="sapo",
            config=SapoConfig,
            build=_build,
            summary="Policy gradient with a soft gate instead of a clip.",
            source="Gao et al. 2025, Soft Adaptive Policy Optimization (arXiv:2511.20347)",
        )
    ]
