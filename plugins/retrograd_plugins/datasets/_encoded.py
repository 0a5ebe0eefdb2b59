"""Encoded conversations as training examples, and what there is to say about a whole file of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from retrograd.conversation import REMARKS, Sample
from retrograd.records import RecordError
from retrograd_hookspecs import TokenExample


def examples(samples: Sequence[Sample], origin: str, ctx: int) -> list[TokenExample]:
    """One example a sample.

    Raises: `RecordError` if one has more than `ctx` tokens (nothing is cut) or no trained token.
    """
    longest = max((len(sample.tokens) for sample in samples), default=0)
    if longest > ctx:
        raise RecordError(
            f"has {longest} tokens, training.ctx is {ctx}",
            hint=f"raise training.ctx to at least {longest}, or shorten or split the record; nothing is cut",
        )
    if not any(any(sample.trained) for sample in samples):
        raise RecordError("has no assistant turn, so nothing in it is trained")
    return [
        TokenExample(
            tokens=np.array(sample.tokens, np.int32),
            trained=np.array(sample.trained, np.bool_),
            origin=origin,
        )
        for sample in samples
    ]


@attrs.define
class Tally:
    """Counts over the records of a file."""

    ctx: int
    records: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    remarks: Counter[str] = attrs.field(factory=Counter)
    first: dict[str, str] = attrs.field(factory=dict)
    ignored: Counter[str] = attrs.field(factory=Counter)

    def count(
        self, origin: str, remarks: Iterable[str], ignored: Iterable[str], found: Sequence[TokenExample]
    ) -> None:
        """Add one record and its examples."""
        self.records += 1
        self.samples += len(found)
        self.tokens += sum(example.tokens.size for example in found)
        self.trained += sum(int(example.trained.sum()) for example in found)
        self.longest = max(self.longest, *(example.tokens.size for example in found))
        self.ignored.update(ignored)
        for remark in remarks:
            self.remarks[remark] += 1
            self.first.setdefault(remark, origin)

    def notes(self) -> list[str]:
        """One line for the counts and one for each remark."""
        lines = [
            f"{self.records} records, {self.samples} samples, {self.tokens} tokens,"
            f" {self.trained} of them trained ({self.trained / max(self.tokens, 1):.0%});"
            f" the longest sample has {self.longest} of {self.ctx} tokens"
        ]
        for remark in REMARKS:
            if remark in self.remarks:
                lines.append(
                    f"{REMARKS[remark]} ({self.remarks[remark]} records, first {self.first[remark]})"
                )
        if self.ignored:
            keys = ", ".join(f"{name!r} in {count}" for name, count in sorted(self.ignored.items()))
            lines.append(f"keys that the format does not read: {keys} records")
        return lines
