"""The fixed reference of a KL penalty: the base model without its adapter, or the model of `[reference]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from retrograd_hookspecs import ModelError, ModelFile

from .engine import TrainingEngine, TrainingSequence

if TYPE_CHECKING:
    from retrograd_hookspecs.training import FloatArray

_TOKENIZER_KEYS = ("model", "pre", "tokens", "merges", "token_type", "bos_token_id", "eos_token_id")


class Reference(Protocol):
    """Scores the trained tokens of sequences."""

    def log_probabilities(
        self, sequences: Sequence[TrainingSequence], families: Sequence[Sequence[int]] = ()
    ) -> list[FloatArray]:
        """log p of the trained tokens of each sequence, in order; `families` as for `TrainingEngine`."""


class BaseReference:
    """The policy's own model with its adapter left out."""

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    def log_probabilities(
        self, sequences: Sequence[TrainingSequence], families: Sequence[Sequence[int]] = ()
    ) -> list[FloatArray]:
        """See `Reference`."""
        with self._engine.model.without_adapter():
            return self._engine.log_probabilities(sequences, families)


def require_same_tokenizer(policy: ModelFile, other: ModelFile, *, what: str) -> None:
    """Raise `ModelError` unless both files have the same tokenizer; `what` names the other's role."""
    for name in _TOKENIZER_KEYS:
        key = f"tokenizer.ggml.{name}"
        mine, theirs = policy.metadata.get(key), other.metadata.get(key)
        if not _equal(mine, theirs):
            raise ModelError(
                f"{other.path}: {key} differs from that of {policy.path}: the {what} must share the model's"
                f" tokenizer{_first_difference(mine, theirs)}"
            )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple) or isinstance(second, list | tuple):
        return list(first or ()) == list(second or ())
    return bool(first == second)


def _first_difference(first: Any, second: Any) -> str:
    if not isinstance(first, list | tuple) or not isinstance(second, list | tuple):
        return f" ({first!r} and {second!r})" if isinstance(first, str | int) else ""
    if len(first) != len(second):
        return f" ({len(first)} and {len(second)} entries)"
    index = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return f" (entry {index}: {first[index]!r} and {second[index]!r})"
