"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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


class TokenConstraint(Protocol):
    """What one sequence may go on with; made anew for each, and asked before every token of it.

    Where the sequence must end, a stop token is all that is allowed.
    """

    problem: str
    """Why the constraint gave up, "" if it did not: from there on everything is allowed."""

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """bool (V,), True for tokens that may come next, at least one of them; None if all may."""

    def advance(self, token: int) -> None:
        """Note the token that was drawn, one of those that were allowed."""


class GrammarEngine(Protocol):
    """Makes constraints out of grammars for the tokenizer of a run."""

    def compile(self, grammar: str) -> Callable[[], TokenConstraint]:
        """A maker of constraints, one a sequence, whose texts the grammar describes.

        `grammar` is in Lark's notation with the extensions of llguidance (`%json`, lazy rules, `~`). A text
        is all that stands between prompt and stop token; a special token is the text that it is decoded to.

        Raises `RolloutError` for a grammar that the engine cannot use, with the reason.
        """
