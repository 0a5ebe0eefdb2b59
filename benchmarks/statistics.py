"""Medians, ranges and ratios of the rounds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

import attrs

from .cases import Case
from .runner import Run, Runs


@attrs.frozen(kw_only=True)
class Spread:
    """Median, least and greatest of some figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of `values`; None if there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(median=statistics.median(ordered), low=ordered[0], high=ordered[-1])


@attrs.frozen(kw_only=True)
class Summary:
    """What the rounds of one contestant on one case come to."""

    case: str
    contestant: str
    rounds: int
    """Rounds that gave a figure."""
    rate: Spread | None
    peak_mb: Spread | None
    failure: str = ""


@attrs.frozen(kw_only=True)
class Comparison:
    """retrograd against one peer on one case; above 1 is better for `rate`, below 1 for `memory`."""

    case: str
    ours: str
    peer: str
    rate: Spread
    """Of the ratios within each round, so that what slowed a whole round down cancels."""
    memory: Spread
    best: bool
    """The peer has the best median rate of all peers of the case."""


def summarise(runs: Runs) -> list[Summary]:
    """A summary a case and contestant, in the order of measurement."""
    out = []
    for (case, contestant), done in runs.items():
        good = [run for run in done if not run.failure]
        out.append(
            Summary(
                case=case,
                contestant=contestant,
                rounds=len(good),
                rate=Spread.of(_rate(run) for run in good),
                peak_mb=Spread.of(_peak(run) for run in good),
                failure=next((run.failure for run in done if run.failure), ""),
            )
        )
    return out


def compare(runs: Runs, cases: Sequence[Case], ours: Sequence[str]) -> list[Comparison]:
    """Each of `ours` against every other contestant of each case, where both have rounds in common."""
    out = []
    for case in cases:
        peers = [name for name in _contestants(runs, case.name) if name not in ours]
        rates = {name: Spread.of(_rate(r) for r in runs[case.name, name] if not r.failure) for name in peers}
        medians = {name: rate.median for name, rate in rates.items() if rate is not None}
        if not medians:
            continue
        best = (max if case.higher_is_better else min)(medians, key=lambda name: medians[name])
        for own, name in itertools.product(ours, medians):
            pairs = _common_rounds(runs.get((case.name, own), []), runs[case.name, name])
            rate = Spread.of(_ratio(_rate(a), _rate(b), case) for a, b in pairs)
            memory = Spread.of(_peak(a) / _peak(b) for a, b in pairs)
            if rate is not None and memory is not None:
                out.append(
                    Comparison(
                        case=case.name, ours=own, peer=name, rate=rate, memory=memory, best=name == best
                    )
                )
    return out


def _contestants(runs: Runs, case: str) -> list[str]:
    return [contestant for name, contestant in runs if name == case]


def _common_rounds(mine: Sequence[Run], theirs: Sequence[Run]) -> list[tuple[Run, Run]]:
    others = {run.round: run for run in theirs if not run.failure}
    return [(run, others[run.round]) for run in mine if not run.failure and run.round in others]


def _ratio(mine: float, theirs: float, case: Case) -> float:
    return mine / theirs if case.higher_is_better else theirs / mine


def _rate(run: Run) -> float:
    return float(run.figures["rate"])


def _peak(run: Run) -> float:
    return float(run.figures["peak_mb"])
