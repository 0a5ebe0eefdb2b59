"""The default sampler: temperature, top-k, top-p, min-p, or greedy.

With logits z and temperature τ, p = softmax(z / τ). Then, in this order, each on what is left:

- `top_k`: the k most likely tokens;
- `top_p`: the fewest most likely tokens whose probabilities sum to at least top_p (Holtzman et al. 2020);
- `min_p`: tokens with p ≥ min_p · max p (Nguyen et al. 2024).

What is left is renormalised, and one uniform number draws the token by inversion of the cumulative
distribution in the order of token ids. Temperature 0 takes the most likely token, the lowest id on a tie.

Without filters rows of float32 logits are drawn from by compiled code, several at a time. A token is a
function of its row of logits, its parameters and its generator, however many rows are drawn from together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import (
    BuildContext,
    Component,
    NoConfig,
    RolloutError,
    Sampler,
    SamplingParams,
    hookimpl,
)

if TYPE_CHECKING:
    from retrograd_hookspecs.training import FloatArray

Probabilities = npt.NDArray[np.float64]


class DefaultSampler:
    """Stateless: the same logits, parameters and generator state give the same token."""

    def sample(
        self, logits: FloatArray, params: SamplingParams, rng: np.random.Generator
    ) -> tuple[int, float]:
        """Token id, and its log-probability under the distribution it was drawn from (0 for greedy).

        Raises `RolloutError` for logits that are not finite.
        """
        [drawn] = _drawn(logits[None], [params], [rng])
        return drawn

    def sample_batch(
        self,
        logits: FloatArray,
        params: Sequence[SamplingParams],
        rngs: Sequence[np.random.Generator],
    ) -> list[tuple[int, float]]:
        """As `sample` for each row of logits (n, V)."""
        if type(self).sample is not DefaultSampler.sample:  # a subclass draws in its own way
            return [self.sample(*one) for one in zip(logits, params, rngs, strict=True)]
        return _drawn(logits, params, rngs)


def _drawn(
    logits: FloatArray, params: Sequence[SamplingParams], rngs: Sequence[np.random.Generator]
) -> list[tuple[int, float]]:
    """A draw from each row of logits (n, V)."""
    plain = [row for row, one in enumerate(params) if _plain(one)] if logits.dtype == np.float32 else []
    drawn: dict[int, tuple[int, float]] = {}
    if plain:
        # Imported at the first draw: it loads the compiler.
        from ._draw import draw

        rows = np.ascontiguousarray(logits if len(plain) == len(params) else logits[plain])
        uniform = [rngs[row].random() for row in plain]
        tokens, logp, highest = draw(rows, [params[row].temperature for row in plain], uniform)
        if not np.isfinite(highest).all():
            worst = plain[int(np.argmin(np.isfinite(highest)))]
            raise _not_finite(float(np.max(logits[worst])))
        pairs = list(zip(tokens.tolist(), logp.tolist(), strict=True))
        if len(plain) == len(params):
            return pairs
        drawn = dict(zip(plain, pairs, strict=True))
    for row, one in enumerate(params):
        if row not in drawn:
            drawn[row] = _sample(logits[row], one, rngs[row])
    return [drawn[row] for row in range(len(params))]


def _plain(params: SamplingParams) -> bool:
    """True for a draw from the whole softmax."""
    return params.temperature > 0.0 and params.top_p >= 1.0 and params.top_k <= 0 and params.min_p <= 0.0


def _not_finite(highest: float) -> RolloutError:
    return RolloutError(f"the model's largest logit is {highest}: its weights or activations are not finite")


def _sample(logits: FloatArray, params: SamplingParams, rng: np.random.Generator) -> tuple[int, float]:
    """A greedy or filtered draw from logits (V,)."""
    highest = float(np.max(logits))
    if not np.isfinite(highest):
        raise _not_finite(highest)
    if params.temperature == 0.0:
        return int(np.argmax(logits)), 0.0
    weights = np.exp((np.asarray(logits, dtype=np.float64) - highest) / params.temperature)
    kept = _filtered(weights / weights.sum(), params)
    cumulative = np.cumsum(kept)
    token = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    # A draw that rounds up to the total belongs to the last token that can be drawn.
    token = min(token, int(np.flatnonzero(kept)[-1]))
    return token, float(np.log(kept[token] / cumulative[-1]))


def _filtered(p: Probabilities, params: SamplingParams) -> Probabilities:
    """Probabilities (V,) with those of tokens that may not be drawn set to 0."""
    if 0 < params.top_k < p.size:
        p = np.where(_largest(p, params.top_k), p, 0.0)
    if params.top_p < 1.0:
        p = np.where(_nucleus(p / p.sum(), params.top_p), p, 0.0)
    if params.min_p > 0.0:
        p = np.where(p >= params.min_p * p.max(), p, 0.0)
    return p


def _largest(p: Probabilities, count: int) -> npt.NDArray[np.bool_]:
    """True for the `count` largest, the lowest ids among equals."""
    threshold = np.partition(p, p.size - count)[p.size - count]
    keep: npt.NDArray[np.bool_] = p > threshold
    keep[np.flatnonzero(p == threshold)[: count - int(keep.sum())]] = True
    return keep


def _nucleus(p: Probabilities, mass: float) -> npt.NDArray[np.bool_]:
    """True for the fewest most likely tokens that sum to at least `mass`."""
    # Tokens below this sum to less than 1 - mass together, so none is needed: only the others are sorted.
    candidates = np.flatnonzero(p >= (1.0 - mass) / p.size)
    order = candidates[np.argsort(-p[candidates], kind="stable")]
    count = int(np.searchsorted(np.cumsum(p[order]), mass, side="left")) + 1
    keep = np.zeros(p.size, dtype=np.bool_)
    keep[order[:count]] = True
    return keep


def _build(config: NoConfig, context: BuildContext) -> Sampler:
    return DefaultSampler()


@hookimpl
def retrograd_samplers() -> Sequence[Component[Any, Any]]:
    """Offer `default`."""
    return [
        Component(
            name="default",
            config=NoConfig,
            build=_build,
            summary="Temperature, top-k, top-p, min-p; temperature 0 is greedy.",
            source="Holtzman et al. 2020, section 3.1 (top-p); Nguyen et al. 2024, section 3 (min-p)",
            fallback=True,
        )
    ]
