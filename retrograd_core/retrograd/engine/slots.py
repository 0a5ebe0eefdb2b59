"""Slots of a generation cache: whose tokens lie where, and what of them can be used again.

Keys and values of a token depend on the tokens up to it alone, so any slot's beginning serves every sequence
that begins with the same tokens. With rounded decoding (`fast`) those of drawn tokens differ in their last
bits from those of a prompt; so that a sequence never depends on who else is there, only the prompt part of a
slot serves others, while a session goes on with all of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
CopyRows = Callable[[int, int, int], None]
"""`copy_rows(source, target, count)`, as `KVCache.copy_rows`."""

LEAST_SHARED = 16
"""Tokens of a common beginning that are worth to be read once for all."""

S = TypeVar("S")


@attrs.define(eq=False)
class Slot(Generic[S]):
    """A range of cache rows, and the tokens whose keys and values are in it."""

    row: int
    tokens: Tokens
    """(slot_tokens,), of which the first `length` are cached."""
    length: int = 0
    prompt_length: int = 0
    """Leading cached tokens that came from a prompt, not from decoding."""
    pending: Tokens = attrs.field(factory=lambda: np.empty(0, np.int32))
    """What is left of the prompt to evaluate."""
    occupant: S | None = None
    session: object = None
    leader: Slot[S] | None = None
    """The slot that evaluates the beginning of this prompt now."""

    def extend(self, tokens: Tokens, *, prompt: bool) -> None:
        """Note that these tokens are in the cache behind those that are there."""
        end = self.length + tokens.size
        self.tokens[self.length : end] = tokens
        if prompt:
            if self.prompt_length == self.length:
                self.prompt_length = end
            self.pending = self.pending[tokens.size :]
        self.length = end

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens."""
        self.length = length
        self.prompt_length = min(self.prompt_length, length)


class Slots(Generic[S]):
    """All slots of a cache. `S` is what occupies one."""

    def __init__(self, count: int, slot_tokens: int, copy_rows: CopyRows) -> None:
        self._copy_rows = copy_rows
        self._slots: list[Slot[S]] = [
            Slot(row=index * slot_tokens, tokens=np.zeros(slot_tokens, np.int32)) for index in range(count)
        ]

    def __iter__(self) -> Iterator[Slot[S]]:
        return iter(self._slots)

    def active(self) -> bool:
        """True if any slot is occupied."""
        return any(slot.occupant is not None for slot in self._slots)

    def with_prompt(self) -> list[Slot[S]]:
        """Occupied slots that have prompt to evaluate and wait for no other."""
        return [s for s in self._slots if s.occupant is not None and s.pending.size and s.leader is None]

    def decoding(self) -> list[Slot[S]]:
        """Occupied slots whose prompt is evaluated."""
        return [s for s in self._slots if s.occupant is not None and not s.pending.size]

    def admit(self, occupant: S, prompt: Tokens, session: object) -> int | None:
        """Give an occupant its session's slot or a free one; the prompt tokens that are cached there already,
        or None if there is no place now."""
        slot = self._place(prompt, session)
        if slot is None:
            return None
        most = prompt.size - 1  # the last token's logits are wanted, so it is evaluated in any case
        usable = slot.length if slot.session is not None else slot.prompt_length
        slot.cut(min(common_length(slot.tokens[:usable], prompt), most))
        slot.occupant, slot.session, slot.leader = occupant, session, None
        self._copy_beginning(slot, prompt[:most])
        slot.pending = prompt[slot.length :]
        slot.leader = self._leader(slot, prompt)
        return slot.length

    def shared(self, slots: Sequence[Slot[S]]) -> list[tuple[int, int]]:
        """For each of these slots the row of one that begins with the same prompt tokens, and how many: slots
        with the same answer are those that read one beginning."""
        found: dict[int, tuple[int, int]] = {}
        for number, leader in enumerate(slots):
            if number in found:
                continue
            beginning = leader.tokens[: leader.prompt_length]
            lengths = {
                other: common_length(beginning, slots[other].tokens[: slots[other].prompt_length])
                for other in range(number + 1, len(slots))
                if other not in found
            }
            enough = max(LEAST_SHARED, leader.prompt_length // 2)
            group = {other: length for other, length in lengths.items() if length >= enough}
            length = min(group.values(), default=0)
            found.update(dict.fromkeys([number, *group], (leader.row, length)))
        return [found[number] for number in range(len(slots))]

    def release(self, slot: Slot[S]) -> None:
        """The occupant leaves; a session keeps the slot. Who waited for its prompt goes on alone."""
        slot.occupant = None
        slot.pending = slot.pending[:0]
        slot.leader = None
        for other in self._slots:
            if other.leader is slot:
                other.leader = None

    def release_followers(self, leader: Slot[S]) -> tuple[int, list[Slot[S]]]:
        """The leader's prompt is evaluated: copy what others share with it.

        Returns how many tokens that were, and the slots with the same prompt: nothing of it is left to
        evaluate, for their next token is drawn from the logits of the leader's.
        """
        copied, same = 0, []
        for slot in self._slots:
            if slot.leader is leader:
                slot.leader = None
                prompt = np.concatenate([slot.tokens[: slot.length], slot.pending])
                before = slot.length
                if np.array_equal(prompt, leader.tokens[: leader.prompt_length]):
                    same.append(slot)
                    self._copy_beginning(slot, prompt)
                else:
                    self._copy_beginning(slot, prompt[:-1])
                slot.pending = prompt[slot.length :]
                copied += slot.length - before
        return copied, same

    def end_session(self, session: object) -> None:
        """The session's slot is free for others, once nothing occupies it."""
        for slot in self._slots:
            if session is not None and slot.session == session:
                slot.session = None

    def forget(self) -> None:
        """Nothing that is cached is valid any more."""
        for slot in self._slots:
            slot.cut(0)

    def _place(self, prompt: Tokens, session: object) -> Slot[S] | None:
        """The session's own slot, or the free one that holds most of the prompt's beginning."""
        if session is not None:
            for slot in self._slots:
                if slot.session == session:
                    return slot if slot.occupant is None else None
        free = [slot for slot in self._slots if slot.occupant is None and slot.session is None]
        return max(
            free, key=lambda slot: common_length(slot.tokens[: slot.prompt_length], prompt), default=None
        )

    def _copy_beginning(self, slot: Slot[S], wanted: Tokens) -> None:
        """Copy what another slot has more of `wanted` than this one."""
        best, length = slot, slot.length
        for other in self._slots:
            shared = common_length(other.tokens[: other.prompt_length], wanted)
            if other is not slot and shared > length:
                best, length = other, shared
        if best is not slot:
            self._copy_rows(best.row, slot.row, length)
            slot.tokens[:length] = wanted[:length]
            slot.length = slot.prompt_length = length

    def _leader(self, slot: Slot[S], prompt: Tokens) -> Slot[S] | None:
        """The slot that is about to evaluate more of this prompt's beginning than is cached, if any."""
        for other in self.with_prompt():
            if other is not slot and other.length == other.prompt_length:
                coming = np.concatenate([other.tokens[: other.length], other.pending])
                if common_length(coming, prompt[:-1]) > slot.length:
                    return other
        return None


def common_length(first: Tokens, second: Tokens) -> int:
    """Length of the common beginning."""
    length = min(first.size, second.size)
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if different.size else length
