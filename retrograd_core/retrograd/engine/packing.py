"""Packing sequences into passes and passes into optimizer steps.

A *pass* is at most `micro_batch` tokens evaluated together; a *step* is the passes of one optimizer update,
here at most `gradient_accumulation`. `docs/training-semantics.md` explains the rules:

- a sequence that fits into a pass is never split;
- a longer one is cut at multiples of `micro_batch` into consecutive passes of one step, so that its
  gradient is exact; the last, shorter piece may share its pass with others;
- one that needs more passes than a step has is spread over several steps. Each of them evaluates the
  earlier tokens anew as *context*: they are seen, but no gradient flows into them.

Positions are those of inputs: position i predicts token i + 1. Everything is a function of the arguments.
`shared_prefix` plans steps whose sequences share prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt

OPEN_STEPS = 16
"""Steps that still take sequences while the packer goes through an epoch: bounds how far a sequence
moves from its place in the shuffled order."""


@attrs.frozen
class Piece:
    """Input positions [start, stop) of the sequence number `sequence`."""

    sequence: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


Pass = tuple[Piece, ...]


@attrs.frozen
class Branch:
    """The first `length` input positions of `sequence` are those of `owner`, and evaluated only there.

    The pieces of `sequence` begin at `length`. An owner is no branch itself. A branch of several pieces
    begins in a later pass than the positions that it shares.
    """

    sequence: int
    owner: int
    length: int


@attrs.frozen(kw_only=True)
class Step:
    """One optimizer step. `context` passes come first and are evaluated without gradient.

    A sequence's pieces are in order, and those of a branch come after, or in the same pass as, the positions
    that it shares.
    """

    passes: tuple[Pass, ...]
    context: tuple[Pass, ...] = ()
    branches: tuple[Branch, ...] = ()

    def pieces(self) -> Iterator[Piece]:
        """The pieces that are trained on, in order."""
        for pieces in self.passes:
            yield from pieces

    def cut_sequences(self) -> frozenset[int]:
        """Sequences whose pieces lie in more than one pass: a loss does not see them whole."""
        count = Counter(piece.sequence for piece in self.pieces())
        return frozenset(sequence for sequence, pieces in count.items() if pieces > 1)


def shuffled_order(count: int, *, seed: int, epoch: int, shuffle: bool = True) -> npt.NDArray[np.int64]:
    """Order of `count` sequences in an epoch: a permutation that depends on seed and epoch alone."""
    if not shuffle:
        return np.arange(count)
    return np.random.default_rng([seed, epoch]).permutation(count)


def plan_epoch(
    predicts: Sequence[npt.NDArray[np.bool_]],
    order: Sequence[int] | npt.NDArray[np.int64],
    *,
    micro_batch: int,
    gradient_accumulation: int,
) -> list[Step]:
    """Steps of one epoch.

    Args:
        predicts: for each sequence, bool by input position: True where the next token is trained. Its
            length is the number of inputs; it ends with the last position that predicts a trained token
            (later ones could not change the loss), so empty ones have nothing to train and are left out.
        order: sequence numbers in the order of the epoch.
    """
    packer = _Packer(micro_batch, gradient_accumulation)
    for number in order:
        sequence = int(number)
        length = len(predicts[sequence])
        span = micro_batch * gradient_accumulation
        # All but the last part of a sequence that needs several steps fill a step each.
        first = 0
        while length - first > span:
            if predicts[sequence][first : first + span].any():
                packer.add_alone(sequence, first, first + span)
            first += span
        if length > first:
            packer.add(sequence, first, length)
    return packer.finish()


@attrs.define
class _OpenStep:
    """A step being filled: passes full of one sequence's piece come before those that are shared, so
    that the pieces of a sequence stay in order."""

    full: list[Pass] = attrs.field(factory=list)
    shared: list[list[Piece]] = attrs.field(factory=list)
    room: list[int] = attrs.field(factory=list)
    """Free tokens of each shared pass."""

    def free_passes(self, limit: int) -> int:
        return limit - len(self.full) - len(self.shared)


class _Packer:
    def __init__(self, micro_batch: int, passes: int) -> None:
        self._micro_batch = micro_batch
        self._limit = passes
        self._steps: list[_OpenStep] = []

    def add_alone(self, sequence: int, start: int, stop: int) -> None:
        """A part that fills all passes of a step."""
        step = self._new_step()
        for first in range(start, stop, self._micro_batch):
            step.full.append((Piece(sequence, first, first + self._micro_batch),))

    def add(self, sequence: int, start: int, stop: int) -> None:
        """A part that fits into one step: into the best place among the open ones, else a new step."""
        cut = start + (stop - start - 1) // self._micro_batch * self._micro_batch
        full = (cut - start) // self._micro_batch
        step, shared = self._best_place(full, stop - cut) or (self._new_step(), -1)
        for first in range(start, cut, self._micro_batch):
            step.full.append((Piece(sequence, first, first + self._micro_batch),))
        if shared < 0:
            step.shared.append([])
            step.room.append(self._micro_batch)
        step.shared[shared].append(Piece(sequence, cut, stop))
        step.room[shared] -= stop - cut

    def finish(self) -> list[Step]:
        """All steps in the order in which they were begun."""
        return [self._step(step) for step in self._steps]

    def _new_step(self) -> _OpenStep:
        step = _OpenStep()
        self._steps.append(step)
        return step

    def _best_place(self, full: int, rest: int) -> tuple[_OpenStep, int] | None:
        """An open step with `full` free passes, and in it the fullest shared pass with room for `rest`
        tokens; failing that, the first step with one more free pass (-1)."""
        window = self._steps[-OPEN_STEPS:]
        best: tuple[int, _OpenStep, int] | None = None
        for step in window:
            if step.free_passes(self._limit) < full:
                continue
            for index, room in enumerate(step.room):
                if rest <= room and (best is None or room < best[0]):
                    best = room, step, index
        if best is not None:
            return best[1:]
        for step in window:
            if step.free_passes(self._limit) > full:
                return step, -1
        return None

    def _step(self, step: _OpenStep) -> Step:
        passes = (*step.full, *(tuple(shared) for shared in step.shared))
        first: dict[int, int] = {}
        for pieces in passes:
            for piece in pieces:
                first.setdefault(piece.sequence, piece.start)
        context = [
            (Piece(sequence, start, start + self._micro_batch),)
            for sequence, begin in first.items()
            for start in range(0, begin, self._micro_batch)
        ]
        return Step(passes=passes, context=tuple(context))
