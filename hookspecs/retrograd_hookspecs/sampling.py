"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import numpy as np

    from .training import FloatArray


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How to draw the next token. temperature 0 is greedy; top_p 1, top_k 0, min_p 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    seed: int = 0


class Sampler(Protocol):
    """Chooses a token for one sequence."""

    def sample(
        self, logits: FloatArray, params: SamplingParams, rng: np.random.Generator
    ) -> tuple[int, float]:
        """Token id and its log-probability under the distribution it was drawn from; logits (V,)."""


@runtime_checkable
class BatchSampler(Sampler, Protocol):
    """A sampler that chooses tokens for several sequences at once. Optional: rows of logits are given to
    `sample` one by one where a sampler has no `sample_batch`."""

    def sample_batch(
        self, logits: FloatArray, params: Sequence[SamplingParams], rngs: Sequence[np.random.Generator]
    ) -> list[tuple[int, float]]:
        """What `sample` gives for each row of logits (n, V): a row's token is a function of that row, its
        parameters and its generator alone."""
