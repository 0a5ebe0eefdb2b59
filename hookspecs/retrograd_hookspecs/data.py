"""Training examples and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import attrs

from .training import AuditFinding

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@attrs.frozen(eq=False, kw_only=True)
class TokenExample:
    """A tokenised training sequence.

    `tokens` int32 (n,); `trained` bool (n,): True where the token is a target of the loss. Token i is
    predicted from tokens [0, i), so `trained[0]` is always False. `origin` is `file:line`.
    """

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    origin: str


class Dataset(Protocol):
    """Reads one data format.

    `turns`: trained runs of tokens are a model's turns, each of which must end in a stop token.
    """

    turns: bool

    def findings(self) -> Sequence[AuditFinding]:
        """What can be said before any data is read: does the model's template fit?"""

    def load(self, path: Path, *, ctx: int) -> Sequence[TokenExample]:
        """All examples. `DataError` lists every bad line as `file:line`. Nothing is cut or dropped:
        an example longer than `ctx` tokens is an error that names it."""

    def notes(self) -> Sequence[str]:
        """What a user should know about the data (counts, template fallbacks), after `load`."""
