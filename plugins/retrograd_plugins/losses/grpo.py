"""GRPO: the clipped policy gradient with group-relative advantages, and a KL penalty to a reference.

L = (1/N) · Σ_t w_t · [ β·k3(log π_ref − log π) − min(r_t·A_t, clip(r_t, 1 − ε_low, 1 + ε_high)·A_t) ]

with r_t = π/π_old of the token, or of its sequence (GSPO). The advantages are the algorithm's
(`retrograd.advantages`). N is a constant: answers × `max_new_tokens`, so that long and short answers count
the same by token (Dr. GRPO). It is the default of::

    [grpo]
    loss = "grpo"

Sources: Shao et al. 2024, DeepSeekMath, equation 3; Liu et al. 2025, Understanding R1-Zero-Like Training,
section 3.2 (Dr. GRPO); Yu et al. 2025, DAPO, equation 10; Zheng et al. 2025, GSPO, equations 7 and 13.
"""

from __future__ import annotations

from retrograd.policy_losses import PolicyTokens, clip_counts, clipped_surrogate, reference_penalty
from retrograd_hookspecs import BuildContext, Component, Loss, LossBatch, LossResult, NoConfig, hookimpl


def grpo(batch: LossBatch) -> LossResult:
    """Value in nats and derivative (n,).

    Raises: `TrainingError` as `PolicyTokens.of`, and without `ref_logp` where β is positive.
    """
    tokens = PolicyTokens.of(batch, "grpo")
    return tokens.result(reference_penalty(tokens) - clipped_surrogate(tokens), clip_counts(tokens))


def _build(config: NoConfig, context: BuildContext) -> Loss:
    return grpo


@hookimpl
def retrograd_losses() -> list[Component[NoConfig, Loss]]:
    """`grpo`."""
    return [
        Component(
            name="grpo",
            config=NoConfig,
            build=_build,
            summary="Clipped policy gradient with group advantages and a KL penalty to the reference.",
            source="Shao et al. 2024, DeepSeekMath; Liu et al. 2025, Dr. GRPO; Yu et al. 2025, DAPO",
        )
    ]
