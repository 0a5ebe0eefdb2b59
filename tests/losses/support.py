"""Batches of losses of rewards, and their formulas written out once more, without the parts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from retrograd_hookspecs import Loss, LossBatch, PolicyObjective

EXTRAS = Path(__file__).resolve().parents[2] / "contrib" / "retrograd-extras"


def sapo(**keys: float) -> Loss:
    """The loss of contrib/retrograd-extras, as a distribution that is not installed."""
    sys.path.insert(0, str(EXTRAS))
    try:
        from retrograd_extras.sapo import Sapo, SapoConfig
    finally:
        sys.path.remove(str(EXTRAS))
    loss: Loss = Sapo(SapoConfig(**keys))
    return loss


def policy_batch(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    normalizer: float = 1.0,
    lengths: Sequence[int] = (),
    objective: PolicyObjective | None = None,
    **extra: Sequence[float],
) -> LossBatch:
    """Tokens with π_old = 1/2 and the given π/π_old; one sequence unless `lengths` says otherwise."""
    n = len(ratios)
    lengths = lengths or (n,)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    old = np.full(n, math.log(0.5))
    return LossBatch(
        logp=old + np.log(np.array(ratios)),
        weight=np.ones(n),
        sequence=sequence,
        position=np.concatenate([np.arange(1, length + 1) for length in lengths]),
        normalizer=normalizer,
        extra={
            "old_logp": old,
            "advantage": np.array(advantages, dtype=np.float64),
            "sequence_tokens": np.array(lengths, np.float64)[sequence],
            **{name: np.array(values, dtype=np.float64) for name, values in extra.items()},
        },
        objective=objective or PolicyObjective(clip_low=0.2, clip_high=0.3),
    )


@st.composite
def batches(draw: Any, *, level: str = "token", own_advantages: bool = True) -> LossBatch:
    """Random batches with ratios on both sides of the clip range, a reference and a sampler."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    n = sequence.size
    old = -rng.exponential(1.5, n) - 1e-3
    drift = rng.normal(0, 0.4, len(lengths))[sequence] + rng.normal(0, 0.4, n)
    advantage = rng.normal(0, 1, n) if own_advantages else rng.normal(0, 1, len(lengths))[sequence]
    return LossBatch(
        logp=old + drift,
        weight=np.ones(n) if level == "sequence" else rng.uniform(0.1, 2.0, n),
        sequence=sequence,
        position=np.concatenate([np.arange(1, length + 1) for length in lengths]),
        normalizer=float(rng.uniform(1, 50)),
        extra={
            "old_logp": old,
            "advantage": advantage,
            "ref_logp": old + rng.normal(0, 0.5, n),
            "sampled_logp": old + rng.normal(0, 0.5, n),
            "sequence_tokens": np.array(lengths, np.float64)[sequence],
        },
        objective=PolicyObjective(
            clip_low=draw(st.sampled_from([0.1, 0.2])),
            clip_high=draw(st.sampled_from([0.2, 0.28])),
            level=level,  # type: ignore[arg-type]
            kl_coefficient=draw(st.sampled_from([0.0, 0.1])),
        ),
    )


def differences(
    value: Callable[[npt.NDArray[np.float64]], float], at: npt.NDArray[np.float64], step: float = 1e-6
) -> npt.NDArray[np.float64]:
    """Central differences of a function of log-probabilities."""
    out = np.empty_like(at)
    for i in range(at.size):
        moved = np.zeros_like(at)
        moved[i] = step
        out[i] = (value(at + moved) - value(at - moved)) / (2 * step)
    return out


def away_from_kinks(batch: LossBatch) -> bool:
    """No ratio within 1e-4 of an end of the clip range, where differences see both sides."""
    assert batch.objective is not None
    drift = batch.logp - batch.extra["old_logp"]
    means = [np.mean(drift[batch.sequence == s]) for s in np.unique(batch.sequence)]
    ratios = np.exp(np.concatenate([drift, means]))
    ends = (1 - batch.objective.clip_low, 1 + batch.objective.clip_high)
    return all(np.abs(ratios - end).min() > 1e-4 for end in ends)


def naive(batch: LossBatch, term: Callable[..., float]) -> float:
    """Σ w · term / N, token by token with the math module; `term(i, ratio)` is one token's loss."""
    assert batch.objective is not None
    total = 0.0
    for i in range(batch.logp.size):
        drift = batch.logp - batch.extra["old_logp"]
        if batch.objective.level == "sequence":
            members = [j for j in range(batch.logp.size) if batch.sequence[j] == batch.sequence[i]]
            ratio = math.prod(math.exp(drift[j]) for j in members) ** (1 / len(members))
        else:
            ratio = math.exp(drift[i])
        total += batch.weight[i] * term(i, ratio)
    return total / batch.normalizer


def clipped_objective(batch: LossBatch, i: int, ratio: float) -> float:
    """PPO's objective of one token by cases instead of min and clip."""
    assert batch.objective is not None
    advantage = float(batch.extra["advantage"][i])
    if advantage >= 0:
        return advantage * (ratio if ratio < 1 + batch.objective.clip_high else 1 + batch.objective.clip_high)
    return advantage * (ratio if ratio > 1 - batch.objective.clip_low else 1 - batch.objective.clip_low)


def reference_term(batch: LossBatch, i: int) -> float:
    """β · (π_ref/π − 1 − log(π_ref/π)) of one token."""
    assert batch.objective is not None
    quotient = math.exp(batch.extra["ref_logp"][i]) / math.exp(batch.logp[i])
    return batch.objective.kl_coefficient * (quotient - 1 - math.log(quotient))


def moved(batch: LossBatch, logp: npt.NDArray[np.float64], *, hold_ratio: bool = False) -> LossBatch:
    """The batch at other log-probabilities; `hold_ratio` moves the old policy with them."""
    extra = dict(batch.extra)
    if hold_ratio:
        extra["old_logp"] = extra["old_logp"] + (logp - batch.logp)
        extra["sampled_logp"] = extra["sampled_logp"] + (logp - batch.logp)
    return attrs.evolve(batch, logp=logp, extra=extra)
