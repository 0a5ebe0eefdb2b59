"""Token sequences as the engine takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import TokenExample

if TYPE_CHECKING:
    from retrograd_hookspecs.training import FloatArray


@attrs.frozen(eq=False, kw_only=True)
class TrainingSequence:
    """Tokens, which of them are trained, and what the loss may want to know about each.

    `tokens` int32 (n,); `trained` bool (n,), `trained[0]` False; `weight` (n,) or None for 1; arrays of
    `extra` (n,). Entries at tokens that are not trained are never read.
    """

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    weight: FloatArray | None = None
    extra: Mapping[str, FloatArray] = attrs.field(factory=dict)

    @classmethod
    def of(cls, example: TokenExample) -> TrainingSequence:
        """A plain example: every trained token has weight 1."""
        return cls(tokens=example.tokens, trained=example.trained)

    @property
    def inputs(self) -> int:
        """Tokens that must be evaluated: those before the last trained one."""
        last = np.flatnonzero(self.trained)
        return int(last[-1]) if last.size else 0

    @property
    def predicts(self) -> npt.NDArray[np.bool_]:
        """Bool (inputs,): where the next token is trained."""
        return self.trained[1 : self.inputs + 1]

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.trained))


def whole_sequence(tokens: npt.NDArray[np.int32]) -> TrainingSequence:
    """All tokens but the first as targets: for scoring."""
    trained = np.ones(len(tokens), dtype=np.bool_)
    trained[:1] = False
    return TrainingSequence(tokens=tokens, trained=trained)


def ranges(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[first, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
