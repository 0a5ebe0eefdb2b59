"""PPO: the clipped policy gradient, with a KL penalty to the policy that generated the batch.

L = (1/N) · Σ_t w_t · [ β·((r_t − 1) − log r_t) − min(r_t·A_t, clip(r_t, 1 − ε, 1 + ε)·A_t) ]
−N·∂L/∂log π_t = w_t · [ A_t·r_t·1[not clipped] + β·(1 − r_t) ]

with r_t = π/π_old, w_t one over the answer's length and N the number of answers. The second term is the
k3 estimate of KL(π_old ‖ π). It is the default of::

    [ppo]
    loss = "ppo"

Sources: Schulman et al. 2017, Proximal Policy Optimization, equations 7 and 8; Schulman 2020,
Approximating KL Divergence (k3).
"""

from __future__ import annotations

from retrograd.policy_losses import PolicyTokens, clip_counts, clipped_surrogate, k3
from retrograd_hookspecs import BuildContext, Component, Loss, LossBatch, LossResult, NoConfig, hookimpl


def ppo(batch: LossBatch) -> LossResult:
    """Value in nats and derivative (n,).

    Raises: `TrainingError` as `PolicyTokens.of`.
    """
    tokens = PolicyTokens.of(batch, "ppo")
    penalty = tokens.objective.kl_coefficient * k3(tokens.log_ratio)
    return tokens.result(penalty - clipped_surrogate(tokens), clip_counts(tokens))


def _build(config: NoConfig, context: BuildContext) -> Loss:
    return ppo


@hookimpl
def retrograd_losses() -> list[Component[NoConfig, Loss]]:
    """`ppo`."""
    return [
        Component(
            name="ppo",
            config=NoConfig,
            build=_build,
            summary="Clipped policy gradient with a KL penalty to the policy of the rollouts.",
            source="Schulman et al. 2017, Proximal Policy Optimization, equation 7",
        )
    ]
