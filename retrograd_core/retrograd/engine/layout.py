"""Where the sequences of a step lie: rows of the key/value cache, and trained rows of each pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.nn.batch import PassBatch, Run, build_pass
from retrograd_hookspecs import Backend

from .packing import Pass, Step
from .sequences import TrainingSequence

if TYPE_CHECKING:
    from retrograd_hookspecs.training import FloatArray


@attrs.frozen(eq=False, kw_only=True)
class StepLayout:
    """Cache rows of a step. Only sequences in more than one piece are cached."""

    first_row: Mapping[int, int]
    """By sequence number."""
    rows: int
    passes: tuple[Pass, ...]
    """The passes that the gradient needs."""
    revisited: frozenset[int]
    """Passes (by index) whose keys and values a later pass reads: they are evaluated once ahead."""


def lay_out(step: Step, sequences: Sequence[TrainingSequence]) -> StepLayout:
    """Leave out passes that no trained token depends on, and hand out cache rows."""
    passes = _needed(step, sequences)
    end: dict[int, int] = {}
    count: dict[int, int] = {}
    for pieces in (*step.context, *passes):
        for piece in pieces:
            end[piece.sequence] = max(end.get(piece.sequence, 0), piece.stop)
            count[piece.sequence] = count.get(piece.sequence, 0) + 1
    first_row: dict[int, int] = {}
    rows = 0
    for sequence, pieces_of_it in count.items():
        if pieces_of_it > 1:
            first_row[sequence] = rows
            rows += end[sequence]
    revisited = frozenset(
        index
        for index, pieces in enumerate(passes)
        if any(piece.stop < end[piece.sequence] for piece in pieces)
    )
    return StepLayout(first_row=first_row, rows=rows, passes=tuple(passes), revisited=revisited)


def _needed(step: Step, sequences: Sequence[TrainingSequence]) -> list[Pass]:
    read_later: set[int] = set()
    needed: list[Pass] = []
    for pieces in reversed(step.passes):
        trained = any(sequences[p.sequence].predicts[p.start : p.stop].any() for p in pieces)
        if trained or any(piece.sequence in read_later for piece in pieces):
            needed.append(pieces)
            read_later.update(piece.sequence for piece in pieces)
    return needed[::-1]


def batch_of(
    pieces: Pass, sequences: Sequence[TrainingSequence], layout: StepLayout, backend: Backend, cache_rows: int
) -> PassBatch:
    """The pass as modules see it."""
    runs = [
        Run(
            tokens=sequences[piece.sequence].tokens[piece.start : piece.stop],
            start=piece.start,
            row=layout.first_row.get(piece.sequence),
        )
        for piece in pieces
    ]
    return build_pass(runs, backend, cache_rows=cache_rows)


@attrs.frozen(eq=False, kw_only=True)
class Targets:
    """The trained tokens of a pass, in the order of its rows."""

    mask: npt.NDArray[np.bool_]
    """(T,): rows of the pass that predict a trained token."""
    tokens: npt.NDArray[np.int32]
    sequence: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    """(n,): the index of each token within its sequence."""
    weight: FloatArray
    extra: Mapping[str, FloatArray]

    @property
    def count(self) -> int:
        return int(self.tokens.size)


def targets_of(pieces: Pass, sequences: Sequence[TrainingSequence], dtype: npt.DTypeLike) -> Targets:
    """Gather what the loss needs; arrays of weights and extras get `dtype`."""
    masks = [sequences[p.sequence].predicts[p.start : p.stop] for p in pieces]
    wanted = [np.flatnonzero(mask) + p.start + 1 for mask, p in zip(masks, pieces, strict=True)]

    def gather(arrays: Sequence[FloatArray | None]) -> FloatArray:
        parts = [
            np.ones(len(index)) if array is None else np.asarray(array)[index]
            for array, index in zip(arrays, wanted, strict=True)
        ]
        return np.concatenate(parts).astype(dtype)

    examples = [sequences[p.sequence] for p in pieces]
    return Targets(
        mask=np.concatenate(masks),
        tokens=np.concatenate([e.tokens[i] for e, i in zip(examples, wanted, strict=True)]).astype(np.int32),
        sequence=np.concatenate(
            [np.full(len(i), p.sequence, dtype=np.int64) for p, i in zip(pieces, wanted, strict=True)]
        ),
        position=np.concatenate(wanted).astype(np.int64),
        weight=gather([e.weight for e in examples]),
        extra={name: gather([e.extra[name] for e in examples]) for name in examples[0].extra},
    )
