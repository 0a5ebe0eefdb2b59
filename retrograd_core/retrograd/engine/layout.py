"""Where the sequences of a step lie: rows of the key/value cache, and trained rows of each pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.nn.batch import PassBatch, Run, build_pass
from retrograd_hookspecs import Backend

from .packing import Branch, Pass, Piece, Step
from .sequences import TrainingSequence

if TYPE_CHECKING:
    from retrograd_hookspecs.training import FloatArray


@attrs.frozen(eq=False, kw_only=True)
class StepLayout:
    """Which passes a step takes, in which order, and which rows of the cache its sequences use.

    Cached are sequences of more than one piece, and owners of a shared prefix that another pass reads. Two
    of them may have the same rows if the passes that use them do not overlap, so a layout is evaluated in
    the order of its passes (scoring) or in the opposite order (gradients), where `ahead` fills the cache.
    """

    passes: tuple[Pass, ...]
    """The passes that the gradient needs."""
    context: tuple[Pass, ...]
    """Passes that are evaluated first, without gradient."""
    branches: Mapping[int, Branch]
    """By the number of the branch's sequence."""
    cached: Mapping[int, range]
    """Cache rows by sequence number."""
    rows: int
    ahead: Mapping[int, tuple[Pass, ...]]
    """By index of a pass: what must be in the cache when its turn comes in the backward order, and is not."""
    opened: Mapping[int, tuple[int, ...]]
    """By index of a pass: sequences whose rows come into use at that moment."""

    def copies(self, pieces: Pass) -> Iterator[tuple[int, int, int]]:
        """(source, target, count) of cache rows: a branch that is cached itself begins with a copy of its
        prefix, which must lie before its first piece."""
        for piece in pieces:
            branch = self.branches.get(piece.sequence)
            if branch is not None and piece.start == branch.length and piece.sequence in self.cached:
                source, target = (self.cached[number].start for number in (branch.owner, branch.sequence))
                yield source, target, branch.length


def lay_out(step: Step, sequences: Sequence[TrainingSequence]) -> StepLayout:
    """Leave out passes that no trained token depends on, and hand out cache rows."""
    branches = {branch.sequence: branch for branch in step.branches}
    passes = _needed(step, sequences, branches)
    places: dict[int, list[tuple[int, Piece]]] = {}
    for index, pieces in enumerate(passes):
        for piece in pieces:
            places.setdefault(piece.sequence, []).append((index, piece))
    readers: dict[int, list[int]] = {}
    for branch in step.branches:
        if branch.sequence in places:
            readers.setdefault(branch.owner, []).append(branch.sequence)
    uses: dict[int, tuple[int, int]] = {}
    begun = {piece.sequence for pieces in step.context for piece in pieces}
    for sequence, own in places.items():
        indices = [index for index, _ in own]
        for reader in readers.get(sequence, ()):
            indices += [index for index, _ in places[reader]]
        if sequence in begun:
            uses[sequence] = indices[0], len(passes) - 1
        elif len(own) > 1 or max(indices) > indices[0]:
            uses[sequence] = indices[0], max(indices)
    cached = _rows(uses, {sequence: places[sequence][-1][1].stop for sequence in uses})
    opened: dict[int, list[int]] = {}
    for sequence, (_, last) in uses.items():
        opened.setdefault(last, []).append(sequence)

    def ahead(closing: Sequence[int]) -> tuple[Pass, ...]:
        by_pass: dict[int, list[Piece]] = {}
        for sequence in closing:
            shared = [branches[r].length for r in readers.get(sequence, ())]
            for index, piece in places[sequence]:
                stop = piece.stop if index < places[sequence][-1][0] else 0
                if any(places[r][-1][0] > index for r in readers.get(sequence, ())):
                    stop = max(stop, min(shared[0], piece.stop))
                if stop > piece.start:
                    by_pass.setdefault(index, []).append(attrs.evolve(piece, stop=stop))
        return tuple(tuple(by_pass[index]) for index in sorted(by_pass))

    return StepLayout(
        passes=tuple(passes),
        context=tuple(pieces for pieces in step.context if any(p.sequence in cached for p in pieces)),
        branches=branches,
        cached=cached,
        rows=max((rows.stop for rows in cached.values()), default=0),
        ahead={index: ahead(closing) for index, closing in opened.items()},
        opened={index: tuple(closing) for index, closing in opened.items()},
    )


def _needed(step: Step, sequences: Sequence[TrainingSequence], branches: Mapping[int, Branch]) -> list[Pass]:
    read_later: set[int] = set()
    needed: list[Pass] = []
    for pieces in reversed(step.passes):
        trained = any(sequences[p.sequence].predicts[p.start : p.stop].any() for p in pieces)
        if trained or any(piece.sequence in read_later for piece in pieces):
            needed.append(pieces)
            read_later.update(piece.sequence for piece in pieces)
            read_later.update(branches[p.sequence].owner for p in pieces if p.sequence in branches)
    return needed[::-1]


def _rows(uses: Mapping[int, tuple[int, int]], sizes: Mapping[int, int]) -> dict[int, range]:
    """Rows for each sequence, the lowest that no other has during the passes [first, last] of its use."""
    rows: dict[int, range] = {}
    live: list[int] = []
    for sequence in sorted(uses, key=lambda number: -uses[number][1]):
        live = [other for other in live if uses[other][0] <= uses[sequence][1]]
        first = 0
        for other in sorted(live, key=lambda number: rows[number].start):
            if first + sizes[sequence] <= rows[other].start:
                break
            first = rows[other].stop
        rows[sequence] = range(first, first + sizes[sequence])
        live.append(sequence)
    return rows


def batch_of(
    pieces: Pass, sequences: Sequence[TrainingSequence], layout: StepLayout, backend: Backend, cache_rows: int
) -> PassBatch:
    """The pass as modules see it."""
    run_of = {piece.sequence: number for number, piece in enumerate(pieces)}

    def run(piece: Piece) -> Run:
        tokens = sequences[piece.sequence].tokens[piece.start : piece.stop]
        branch = layout.branches.get(piece.sequence)
        if piece.sequence in layout.cached:
            return Run(tokens=tokens, start=piece.start, row=layout.cached[piece.sequence].start)
        if branch is None:
            return Run(tokens=tokens)
        if branch.owner in layout.cached:
            return Run(tokens=tokens, start=piece.start, context_row=layout.cached[branch.owner].start)
        return Run(tokens=tokens, start=piece.start, context_run=run_of[branch.owner])

    return build_pass([run(piece) for piece in pieces], backend, cache_rows=cache_rows)


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
