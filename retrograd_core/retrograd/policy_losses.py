"""Parts of losses of learning from rewards, which compose as the formula in the paper reads.

A loss of this kind is a function of each token's log-probability. A `Dual` is a quantity a token together
with its derivative by the token's own log-probability, in float64; its operators are the rules of
differentiation. So GRPO is, with its gradient::

    def grpo(batch: LossBatch) -> LossResult:
        tokens = PolicyTokens.of(batch, "grpo")
        ratio, advantage = tokens.ratio, tokens.advantage
        surrogate = minimum(ratio * advantage, clip(ratio, tokens.lowest, tokens.highest) * advantage)
        return tokens.result(reference_penalty(tokens) - surrogate, clip_counts(tokens))

Every array has shape (n,), one entry a trained token of the pass. Log-probabilities, KL divergences and
losses are in nats.

A pass may hold only a part of a sequence. Nothing but the ratio at level "sequence" depends on tokens
outside of the pass; see `PolicyTokens.of`.

Sources: Schulman et al. 2017 (PPO), Shao et al. 2024 (GRPO), Yu et al. 2025 (DAPO), Liu et al. 2025
(Dr. GRPO), Zheng et al. 2025 (GSPO). `docs/objectives.md` has the formulas and where they deviate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import LossBatch, LossResult, PolicyObjective, TrainingError

Array = npt.NDArray[np.float64]


@attrs.frozen(eq=False)
class Dual:
    """A quantity a token: `value` (n,) and `slope` (n,), its derivative by the token's own log-probability.

    `+`, `-` and `*` accept a `Dual`, an array (n,) or a number; arrays and numbers are constants.
    """

    value: Array
    slope: Array

    __array_ufunc__ = None  # `array * dual` is then `dual.__rmul__(array)`

    def __add__(self, other: Dual | Array | float) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value + other.value, self.slope + other.slope)
        return Dual(self.value + other, self.slope)

    def __mul__(self, other: Dual | Array | float) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)
        return Dual(self.value * other, self.slope * other)

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.slope)

    def __sub__(self, other: Dual | Array | float) -> Dual:
        return self + (-other)

    def __rsub__(self, other: Array | float) -> Dual:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def chain(self, value: Array, derivative: Array) -> Dual:
        """A function of this quantity, given by its values and its derivatives at `self.value`."""
        return Dual(value, derivative * self.slope)


def exp(x: Dual) -> Dual:
    """e^x. Overflows to infinity, which `PolicyTokens` reports."""
    with np.errstate(over="ignore"):
        value = np.exp(x.value)
    return x.chain(value, value)


def minimum(first: Dual, second: Dual) -> Dual:
    """The smaller of two quantities; the first where they are equal."""
    chosen = first.value <= second.value
    return Dual(
        np.where(chosen, first.value, second.value),
        np.where(chosen, first.slope, second.slope),
    )


def clip(x: Dual, lowest: float, highest: float) -> Dual:
    """x within [lowest, highest]; constant outside."""
    inside = (x.value >= lowest) & (x.value <= highest)
    return x.chain(np.clip(x.value, lowest, highest), inside.astype(np.float64))


def stop_gradient(x: Dual) -> Array:
    """The values alone: constants for whatever is built on them."""
    return x.value


def k3(log_ratio: Dual) -> Dual:
    """e^x − 1 − x of x = log(q/p), p the policy that drew the token: an estimate of KL(p ‖ q).

    It is never negative and unbiased under p.

    Source: Schulman 2020, Approximating KL Divergence, estimator k3.
    """
    return exp(log_ratio) - log_ratio - 1.0


@attrs.frozen(eq=False, kw_only=True)
class PolicyTokens:
    """The trained tokens of a pass, in float64, with their ratios. `loss` names the loss in errors."""

    batch: LossBatch
    loss: str
    objective: PolicyObjective
    logp: Dual
    """log π of each token: slope 1."""
    log_ratio: Dual
    """log π − log π_old of each token, whatever the level."""
    ratio: Dual
    """The importance ratio at the objective's level."""
    advantage: Array

    @classmethod
    def of(cls, batch: LossBatch, loss: str) -> PolicyTokens:
        """Read `batch`; `extra` must hold `old_logp` and `advantage`.

        At level "token" the ratio is r_t = exp(log π − log π_old). At level "sequence" it is GSPO's
        s_i = exp(mean over the sequence's trained tokens of log π − log π_old), and its slope is s_i, as in
        GSPO-token (equation 14, sg[s_i] · π / sg[π]): each token keeps its own advantage, and where all
        tokens of a sequence have the same one, the gradient is that of GSPO. (The derivative of s_i itself
        would spread the mean advantage of a sequence over its tokens; advantages that are centred within a
        sequence would cancel.) Given s_i, the gradient of a token depends on nothing outside of its pass.

        The mean is taken from `extra["sequence_log_ratio"]`, the same at each token of a sequence. Where that
        is missing the pass must hold whole sequences, and `extra["sequence_tokens"]`, the number of trained
        tokens of the sequence at each of its tokens, proves that it does.

        Raises: `TrainingError` if the objective or an array is missing, a number is not finite, the divisor
        is not positive, or a sequence is cut and its mean is not given.

        Source: Zheng et al. 2025, GSPO (arXiv:2507.18071), equations 7 and 13–17.
        """
        if batch.objective is None:
            raise TrainingError(
                f"{loss}: no clip range was given: this loss is for algorithms that learn from rewards"
                " (ppo, grpo, agent_grpo, distill)"
            )
        if not (math.isfinite(batch.normalizer) and batch.normalizer > 0):
            raise TrainingError(
                f"{loss}: the loss is divided by {batch.normalizer!r}, which must be positive:"
                " the optimizer step holds no answer"
            )
        own = _finite(batch.logp, loss, "logp")
        logp = Dual(own, np.ones_like(own))
        log_ratio = logp - _extra(batch, loss, "old_logp")
        if batch.objective.level == "sequence":
            ratio = exp(Dual(_sequence_log_ratio(batch, loss, log_ratio.value), np.ones_like(own)))
        else:
            ratio = exp(log_ratio)
        if not np.all(np.isfinite(ratio.value)):
            raise TrainingError(
                f"{loss}: the ratio to the policy of the rollouts is not finite for"
                f" {np.count_nonzero(~np.isfinite(ratio.value))} of {own.size} tokens (a log-probability rose"
                f" by {np.max(log_ratio.value):.4g} nats): lower [training].lr or train less on each batch"
            )
        return cls(
            batch=batch,
            loss=loss,
            objective=batch.objective,
            logp=logp,
            log_ratio=log_ratio,
            ratio=ratio,
            advantage=_extra(batch, loss, "advantage"),
        )

    @property
    def lowest(self) -> float:
        """1 − ε_low."""
        return 1.0 - self.objective.clip_low

    @property
    def highest(self) -> float:
        """1 + ε_high."""
        return 1.0 + self.objective.clip_high

    def array(self, name: str) -> Array:
        """`extra[name]` in float64. Raises: `TrainingError` if it is missing or not finite."""
        return _extra(self.batch, self.loss, name)

    def total(self, quantity: Array | npt.NDArray[np.bool_]) -> float:
        """Sum over the tokens that count: a weight of 0 masks a token."""
        return float(np.sum(quantity, dtype=np.float64, where=self.batch.weight != 0))

    def result(self, loss: Dual, metrics: Mapping[str, float] | None = None) -> LossResult:
        """Σ_t weight_t · loss_t / normalizer and its derivative, with the sums that every such loss reports.

        `metrics` adds the loss's own. All are sums over tokens that are not masked; `policy_means` turns
        those of a whole step into what is logged.

        Raises: `TrainingError` if the loss or its derivative is not finite.
        """
        scale = self.batch.weight.astype(np.float64) / self.batch.normalizer
        value, dlogp = float(np.dot(scale, loss.value)), scale * loss.slope
        if not (math.isfinite(value) and np.all(np.isfinite(dlogp))):
            raise TrainingError(
                f"{self.loss}: the loss of {np.count_nonzero(~np.isfinite(loss.value))} of {dlogp.size}"
                f" tokens is not finite (ratio up to {np.max(self.ratio.value):.4g}): lower [training].lr"
            )
        sums = {
            "tokens": self.total(np.ones_like(dlogp)),
            "ratio": self.total(self.ratio.value),
            "kl_old": self.total(k3(self.log_ratio).value),
            "advantage_abs": self.total(np.abs(self.advantage)),
        }
        if "ref_logp" in self.batch.extra:
            sums["kl_reference"] = self.total(reference_kl(self).value)
        return LossResult(
            value=value,
            dlogp=dlogp.astype(self.batch.logp.dtype, copy=False),
            metrics={**sums, **(metrics or {})},
        )


def clipped_surrogate(tokens: PolicyTokens) -> Dual:
    """min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A): to be maximised.

    Sources: Schulman et al. 2017, PPO, equation 7; Yu et al. 2025, DAPO, equation 10 (two clip distances).
    """
    ratio, advantage = tokens.ratio, tokens.advantage
    return minimum(ratio * advantage, clip(ratio, tokens.lowest, tokens.highest) * advantage)


def clip_counts(tokens: PolicyTokens) -> dict[str, float]:
    """Tokens whose gradient the clip of `clipped_surrogate` removes: a ratio that is too high with a
    positive advantage, or too low with a negative one."""
    ratio, advantage = tokens.ratio.value, tokens.advantage
    return {
        "clipped_low": tokens.total((ratio < tokens.lowest) & (advantage < 0)),
        "clipped_high": tokens.total((ratio > tokens.highest) & (advantage > 0)),
    }


def reference_kl(tokens: PolicyTokens) -> Dual:
    """k3 of log(π_ref / π): an estimate of KL(π ‖ π_ref). Needs `extra["ref_logp"]`."""
    return k3(tokens.array("ref_logp") - tokens.logp)


def reference_penalty(tokens: PolicyTokens) -> Dual | float:
    """β · KL to the reference, with the objective's coefficient; 0 where that is 0.

    Source: Shao et al. 2024, DeepSeekMath, equations 3 and 4.
    """
    coefficient = tokens.objective.kl_coefficient
    return coefficient * reference_kl(tokens) if coefficient else 0.0


def sampler_weight(tokens: PolicyTokens, cap: float) -> Array:
    """π_old / π_sampler of each token: how much likelier it was under the training path than when it was
    drawn, at most `cap`. A constant, exactly 1 where both agree. Needs `extra["sampled_logp"]`.

    Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (truncated
    importance sampling).
    """
    return np.minimum(_sampler_ratio(tokens), cap)


def beyond_cap(tokens: PolicyTokens, cap: float) -> npt.NDArray[np.bool_]:
    """Tokens whose π_old / π_sampler is above `cap`."""
    return _sampler_ratio(tokens) > cap


def _sampler_ratio(tokens: PolicyTokens) -> Array:
    with np.errstate(over="ignore"):  # infinity is above every cap
        return np.exp(tokens.array("old_logp") - tokens.array("sampled_logp"))


def policy_means(sums: Mapping[str, float]) -> dict[str, float]:
    """What is logged of a step, from the sums of its passes: each is divided by the number of tokens.

    `clipped_low` → `policy/clip_fraction_low`, `clipped_high` → `policy/clip_fraction_high`, `kl_old` →
    `policy/approx_kl`, `kl_reference` → `policy/kl_reference`, `ratio` → `policy/ratio_mean`,
    `advantage_abs` → `policy/advantage_abs`; another sum keeps its name: `policy/NAME`. Empty without tokens.
    """
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    return {
        f"policy/{_LOGGED.get(name, name)}": value / tokens
        for name, value in sums.items()
        if name != "tokens"
    }


_LOGGED = {
    "clipped_low": "clip_fraction_low",
    "clipped_high": "clip_fraction_high",
    "kl_old": "approx_kl",
    "ratio": "ratio_mean",
}


def _sequence_log_ratio(batch: LossBatch, loss: str, log_ratio: Array) -> Array:
    if "sequence_log_ratio" in batch.extra:
        return _extra(batch, loss, "sequence_log_ratio")
    _, index, count = np.unique(batch.sequence, return_inverse=True, return_counts=True)
    here, whole = count[index], _extra(batch, loss, "sequence_tokens")
    if np.any(here != whole):
        first = int(np.flatnonzero(here != whole)[0])
        raise TrainingError(
            f"{loss}: a pass holds {here[first]} of the {whole[first]:g} trained tokens of sequence"
            f' {batch.sequence[first]}, but importance_sampling_level = "sequence" needs all of them or'
            " extra['sequence_log_ratio']"
        )
    mean: Array = np.bincount(index, weights=log_ratio)[index] / here
    return mean


def _extra(batch: LossBatch, loss: str, name: str) -> Array:
    if name not in batch.extra:
        given = ", ".join(sorted(batch.extra)) or "nothing"
        raise TrainingError(
            f"{loss}: the algorithm gives no {name!r}, which this loss needs (given: {given})"
        )
    return _finite(batch.extra[name], loss, name)


def _finite(array: npt.NDArray[np.floating], loss: str, name: str) -> Array:
    wide = array.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(wide))
    if bad.size:
        raise TrainingError(
            f"{loss}: {name!r} is {wide[bad[0]]} at token {bad[0]} of the pass; {bad.size} of {wide.size}"
            " values are not finite"
        )
    return wide
