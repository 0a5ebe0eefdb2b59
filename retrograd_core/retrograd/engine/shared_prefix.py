"""One step out of all sequences of an update, in which sequences of one prompt share its evaluation.

Sequences that begin with the same tokens (the answers to a prompt, the two sides of a preference) are a
*family*. What they share is the beginning that is equal in all of them and predicts no trained token: of a
prompt with P tokens, and answers that are trained, the first P − 1. One member, the *owner*, is evaluated
whole. The others, its *branches*, are evaluated from there on, and attend to the owner's keys and values.
Each row still has one target at most, and attends to the same keys in the same order as without sharing, so
log-probabilities stay what they are bit for bit, and gradients up to the order of sums.

A family that fits into a pass is put into one. The prefix of another is kept in the key/value cache, as is
done for sequences that are cut.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs
import numpy as np

from .layout import lay_out
from .packing import Branch, Piece, Step
from .sequences import TrainingSequence

Fanout = int | Literal["auto", "off", "max"]

PASS_COST = 16
"""What a pass costs besides its tokens, in evaluated tokens: the time in which the weights are read."""
GRADIENT_COST = 2
"""What a token with its gradient costs, in evaluated tokens."""
TOGETHER = 2
"""Sequences whose keys and values are cached at the same time, so that their rests share passes, take at most
this many passes' rows in all, or those that a single one of them needs."""


@attrs.frozen(kw_only=True)
class PackingStats:
    """How well the sequences of a step fill its passes, and what shared prefixes saved."""

    passes: int
    """Passes with a gradient."""
    capacity: int
    """Tokens that they have room for."""
    tokens: int
    """Tokens in them: each is evaluated with its gradient once."""
    tokens_saved: int
    """Tokens that would be in them too if nothing were shared."""
    fanout_mean: float
    """Sequences that share one copy of a prefix, on average over the copies; 1 if none is shared."""

    @classmethod
    def of(cls, step: Step, micro_batch: int) -> PackingStats:
        """The figures of a step with passes of at most `micro_batch` tokens."""
        owners = {branch.owner for branch in step.branches}
        return cls(
            passes=len(step.passes),
            capacity=len(step.passes) * micro_batch,
            tokens=sum(piece.length for piece in step.pieces()),
            tokens_saved=sum(branch.length for branch in step.branches),
            fanout_mean=1.0 + len(step.branches) / max(len(owners), 1),
        )

    @property
    def efficiency(self) -> float:
        """Part of the passes' room that is used."""
        return self.tokens / max(self.capacity, 1)

    @property
    def prefix_share(self) -> float:
        """Part of the sequences' tokens that sharing saved."""
        return self.tokens_saved / max(self.tokens + self.tokens_saved, 1)

    def metrics(self) -> dict[str, float]:
        """By name, as sinks take them: `packing/…`."""
        return {
            "packing/efficiency": self.efficiency,
            "packing/tokens": float(self.tokens),
            "packing/tokens_saved": float(self.tokens_saved),
            "packing/prefix_share": self.prefix_share,
            "packing/passes": float(self.passes),
            "packing/fanout_mean": self.fanout_mean,
        }


def plan_step(
    sequences: Sequence[TrainingSequence],
    families: Sequence[Sequence[int]] = (),
    *,
    micro_batch: int,
    fanout: Fanout = "auto",
    gradients: bool = True,
) -> Step:
    """Pack all `sequences` into one step of as many passes as it takes; those without a target are left out.

    A sequence that fits into a pass is not cut; others are cut into whole passes and a rest.

    Args:
        families: numbers of sequences by prompt, each number at most once. How many tokens the members of a
            family share is found from their tokens and targets.
        micro_batch: most tokens of a pass.
        fanout: how many members share one copy of their prefix: "off" none, a number at most so many, "max"
            all; "auto" takes for each family what evaluates the fewest tokens (see `_cheapest`), and
            shares nothing if that makes the whole step cheaper (`step_cost`).
        gradients: whether the step is for training; else it is only evaluated, in the order of its passes.

    Raises:
        ValueError: a family names a sequence that does not exist, or one that another family has; `fanout` is
            a number below 2.
    """
    if not isinstance(fanout, str) and fanout < 2:
        raise ValueError(f'fanout is {fanout}; it must be "auto", "off", "max" or a number of at least 2')
    lengths = [sequence.inputs for sequence in sequences]
    chosen = _members(families, lengths)
    alone = [_Unit(number, inputs) for number, inputs in enumerate(lengths) if inputs]
    if fanout == "off" or not chosen:
        return _pack(alone, micro_batch)
    taken = {number for members in chosen for number in members}
    units = [unit for unit in alone if unit.owner not in taken]
    for members in chosen:
        shared = shared_length([sequences[number] for number in members])
        units += _family_units(members, lengths, shared, micro_batch, fanout, gradients)
    step = _pack(units, micro_batch)
    if fanout == "auto" and step.branches:
        unshared = _pack(alone, micro_batch)
        costs = [step_cost(plan, sequences, gradients=gradients) for plan in (step, unshared)]
        return step if costs[0] <= costs[1] else unshared
    return step


def most_cache_rows(longest: int, micro_batch: int, *, families: bool) -> int:
    """Rows of the cache that no step of `plan_step` exceeds, of sequences with up to `longest` inputs.

    `families`: whether there may be any. Without, and if none is longer than a pass, there is no cache.
    """
    together = max(longest, TOGETHER * micro_batch)
    if longest > micro_batch:
        return longest + together if families else together
    return together if families else 0


def shared_length(members: Sequence[TrainingSequence]) -> int:
    """Input positions that all members evaluate alike and that predict a trained token of none of them."""
    first = members[0].tokens
    length = min(int(np.argmax(member.trained)) for member in members) - 1
    for member in members[1:]:
        equal = first[:length] == member.tokens[:length]
        length = length if equal.all() else int(np.argmin(equal))
    return max(length, 0)


def step_cost(step: Step, sequences: Sequence[TrainingSequence], *, gradients: bool = True) -> int:
    """Evaluated tokens that take as long as the step: its passes, and those that fill the cache for them."""
    layout = lay_out(step, sequences)
    cost = sum(PASS_COST + sum(piece.length for piece in pieces) for pieces in layout.passes)
    if not gradients:
        return cost
    ahead = (pieces for passes in layout.ahead.values() for pieces in passes)
    return GRADIENT_COST * cost + sum(PASS_COST + sum(p.length for p in pieces) for pieces in ahead)


@attrs.frozen
class _Unit:
    """Sequences that are planned together: one, or the owner of a prefix and its branches."""

    owner: int
    inputs: int
    shared: int = 0
    branches: tuple[tuple[int, int], ...] = ()
    """(sequence, its inputs behind the prefix)."""

    @property
    def tokens(self) -> int:
        return self.inputs + sum(own for _, own in self.branches)

    def long_branches(self, micro_batch: int) -> list[tuple[int, int]]:
        """Those that are cut themselves."""
        return [branch for branch in self.branches if branch[1] > micro_batch]

    def cost(self, micro_batch: int, *, gradients: bool) -> int:
        """As `step_cost`, but for what passes with a gradient cost besides their tokens: their number is
        not known before all units are packed."""
        if not gradients or self.tokens <= micro_batch:
            return self.tokens * (GRADIENT_COST if gradients else 1)
        ahead = max(self.shared if self.branches else 0, _whole(self.inputs, micro_batch))
        ahead += sum(_whole(own, micro_batch) for _, own in self.branches)
        return GRADIENT_COST * self.tokens + ahead + PASS_COST * -(-ahead // micro_batch)


def _whole(length: int, micro_batch: int) -> int:
    """Positions of the pieces that fill passes; the rest, at least one position, is a piece of its own."""
    return (length - 1) // micro_batch * micro_batch


def _members(families: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Families of at least two sequences that have a target."""
    seen: set[int] = set()
    for number in (number for members in families for number in members):
        if not 0 <= number < len(lengths):
            raise ValueError(f"a family names sequence {number}, but there are {len(lengths)}")
        if number in seen:
            raise ValueError(f"families name sequence {number} twice")
        seen.add(number)
    trained = ([number for number in members if lengths[number]] for members in families)
    return [members for members in trained if len(members) > 1]


def _family_units(
    members: Sequence[int],
    lengths: Sequence[int],
    shared: int,
    micro_batch: int,
    fanout: Fanout,
    gradients: bool,
) -> list[_Unit]:
    if not shared:
        return _units([[number] for number in members], lengths, 0)
    if fanout == "auto":
        return _cheapest(members, lengths, shared, micro_batch, gradients)
    most = len(members) if fanout == "max" else int(fanout)
    chunks = [members[first : first + most] for first in range(0, len(members), most)]
    return _units(chunks, lengths, shared)


def _units(chunks: Iterable[Sequence[int]], lengths: Sequence[int], shared: int) -> list[_Unit]:
    """A unit a chunk. Its longest sequence owns the prefix: if any is longer than a pass, then this one."""
    units: list[_Unit] = []
    for chunk in chunks:
        owner = max(chunk, key=lambda number: lengths[number])
        branches = tuple((number, lengths[number] - shared) for number in chunk if number != owner)
        units.append(_Unit(owner, lengths[owner], shared if branches else 0, branches))
    return units


def _cheapest(
    members: Sequence[int], lengths: Sequence[int], shared: int, micro_batch: int, gradients: bool
) -> list[_Unit]:
    """The cheapest of three: nothing shared; a copy of the prefix for as many members as fit into a pass
    with it; one copy for all, which may have to be cached."""
    fitting: list[list[int]] = []
    room: list[int] = []
    rest: list[int] = []
    for number in sorted(members, key=lambda number: -lengths[number]):
        own = lengths[number] - shared
        if lengths[number] > micro_batch:
            rest.append(number)
            continue
        places = [index for index, free in enumerate(room) if own <= free]
        if places:
            best = min(places, key=lambda index: room[index])
        else:
            best = len(fitting)
            fitting.append([])
            room.append(micro_batch - shared)
        fitting[best].append(number)
        room[best] -= own
    options = (
        [[number] for number in members],
        [*fitting, *([rest] if rest else [])],
        [list(members)],
    )
    plans = [_units(chunks, lengths, shared) for chunks in options]
    return min(plans, key=lambda units: sum(unit.cost(micro_batch, gradients=gradients) for unit in units))


class _Passes:
    """Passes in their order, and the room in each."""

    def __init__(self, micro_batch: int) -> None:
        self._micro_batch = micro_batch
        self._open: list[tuple[int, int]] = []
        """(free tokens, index) of passes with room, sorted."""
        self.pieces: list[list[Piece]] = []

    def put(self, pieces: Sequence[Piece], first: int = 0) -> int:
        """Into the fullest pass with room, from index `first` on, else into a new one; its index."""
        size = sum(piece.length for piece in pieces)
        for at in range(bisect_left(self._open, (size, 0)), len(self._open)):
            free, index = self._open[at]
            if index >= first:
                del self._open[at]
                break
        else:
            free, index = self._micro_batch, len(self.pieces)
            self.pieces.append([])
        self.pieces[index] += pieces
        if free > size:
            insort(self._open, (free - size, index))
        return index

    def put_whole(self, sequence: int, start: int, stop: int) -> None:
        """All but the rest of positions [start, stop), each piece into a new pass."""
        for first in range(start, start + _whole(stop - start, self._micro_batch), self._micro_batch):
            self.pieces.append([Piece(sequence, first, first + self._micro_batch)])

    def put_rests(self, parts: Mapping[int, tuple[int, int]], first: int) -> dict[int, int]:
        """The rests of positions [start, stop) by sequence, the longest first; gives each one's pass."""
        rests = {
            number: Piece(number, start + _whole(stop - start, self._micro_batch), stop)
            for number, (start, stop) in parts.items()
        }
        order = sorted(rests, key=lambda number: -rests[number].length)
        return {number: self.put([rests[number]], first) for number in order}


def _pack(units: Sequence[_Unit], micro_batch: int) -> Step:
    """Units that need the cache come first, a few at a time, and the others fill the room that they leave.

    Everything goes into the fullest pass that has room, the longest first (best-fit decreasing).
    """
    passes = _Passes(micro_batch)
    whole = [unit for unit in units if unit.tokens <= micro_batch]
    for section in _sections([unit for unit in units if unit.tokens > micro_batch], micro_batch):
        _place(section, passes, micro_batch)
    for unit in sorted(whole, key=lambda unit: -unit.tokens):
        pieces = [Piece(unit.owner, 0, unit.inputs)]
        pieces += [Piece(number, unit.shared, unit.shared + own) for number, own in unit.branches]
        passes.put(pieces)
    return Step(
        passes=tuple(tuple(pieces) for pieces in passes.pieces),
        branches=tuple(
            Branch(number, unit.owner, unit.shared) for unit in units for number, _ in unit.branches
        ),
    )


def _sections(units: Sequence[_Unit], micro_batch: int) -> list[list[_Unit]]:
    """Units whose keys and values are cached at the same time, so that their rests share passes."""
    sections: list[list[_Unit]] = []
    room = 0
    for unit in sorted(units, key=lambda unit: -unit.inputs):
        alone = bool(unit.long_branches(micro_batch))
        if not sections or alone or unit.inputs > room:
            sections.append([])
            room = 0 if alone else TOGETHER * micro_batch
        sections[-1].append(unit)
        room -= unit.inputs
    return sections


def _place(section: Sequence[_Unit], passes: _Passes, micro_batch: int) -> None:
    """Owners first, then branches that are cut, a few at a time, then the others."""
    begin = len(passes.pieces)
    complete: dict[int, int] = {}
    """By owner: the index of the pass with the last position of its prefix."""
    for unit in section:
        complete[unit.owner] = len(passes.pieces) + (unit.shared - 1) // micro_batch
        passes.put_whole(unit.owner, 0, unit.inputs)
    rests = passes.put_rests({unit.owner: (0, unit.inputs) for unit in section}, len(passes.pieces))
    for unit in section:
        if unit.shared > _whole(unit.inputs, micro_batch):
            complete[unit.owner] = rests[unit.owner]
    for unit in section:
        for group in _together(unit, micro_batch):
            for number, own in group:
                passes.put_whole(number, unit.shared, unit.shared + own)
            parts = {number: (unit.shared, unit.shared + own) for number, own in group}
            passes.put_rests(parts, len(passes.pieces))
    short = [(own, number, unit) for unit in section for number, own in unit.branches if own <= micro_batch]
    for own, number, unit in sorted(short, key=lambda item: -item[0]):
        piece = Piece(number, unit.shared, unit.shared + own)
        passes.put([piece], max(begin, complete[unit.owner]))


def _together(unit: _Unit, micro_batch: int) -> list[list[tuple[int, int]]]:
    """The branches that are cut, in groups that are cached at the same time."""
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for number, own in unit.long_branches(micro_batch):
        rows = unit.shared + own
        if not groups or rows > room:
            groups.append([])
            room = TOGETHER * micro_batch
        groups[-1].append((number, own))
        room -= rows
    return groups
