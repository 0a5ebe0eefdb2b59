"""Medians, ranges and ratios within rounds."""

from __future__ import annotations

import pytest
from benchmarks.cases import Case
from benchmarks.statistics import Spread, compare, summarise

from .helpers import failed, run

CASE = Case(name="sft/m/1x512", kind="sft", unit="tok/s", title="a step")


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)
    assert Spread.of([4.0, 1.0]) == Spread(median=2.5, low=1.0, high=4.0)
    assert Spread.of([]) is None


def test_ratios_are_taken_within_rounds() -> None:
    # The second round was three times slower for both: the ratio of that round is untouched.
    runs = {
        (CASE.name, "retrograd"): [run(1, 300, 50), run(2, 100, 50), run(3, 320, 60)],
        (CASE.name, "peer"): [run(1, 100, 200), run(2, 40, 100), run(3, 100, 200)],
    }
    [comparison] = compare(runs, [CASE], ["retrograd"])
    assert comparison.rate == Spread(median=3.0, low=2.5, high=3.2)
    assert comparison.memory == Spread(median=0.3, low=0.25, high=0.5)
    assert comparison.best


def test_best_peer_by_median_rate() -> None:
    runs = {
        (CASE.name, "retrograd"): [run(1, 10), run(2, 10)],
        (CASE.name, "slow"): [run(1, 2), run(2, 2)],
        (CASE.name, "fast"): [run(1, 5), run(2, 5)],
    }
    assert {c.peer: c.best for c in compare(runs, [CASE], ["retrograd"])} == {"slow": False, "fast": True}


def test_lower_is_better() -> None:
    case = Case(name="latency", kind="sft", unit="s", title="", higher_is_better=False)
    runs = {
        (case.name, "retrograd"): [run(1, 2)],
        (case.name, "quick"): [run(1, 4)],
        (case.name, "slow"): [run(1, 8)],
    }
    ratios = {c.peer: (c.rate.median, c.best) for c in compare(runs, [case], ["retrograd"])}
    assert ratios == {"quick": (2.0, True), "slow": (4.0, False)}


def test_only_rounds_that_both_have() -> None:
    runs = {
        (CASE.name, "retrograd"): [run(1, 10), failed(2)],
        (CASE.name, "peer"): [run(1, 5), run(2, 1)],
    }
    [comparison] = compare(runs, [CASE], ["retrograd"])
    assert comparison.rate.median == 2.0


def test_a_setting_of_ours_is_no_peer() -> None:
    runs = {
        (CASE.name, "retrograd"): [run(1, 10)],
        (CASE.name, "retrograd-bf16"): [run(1, 20)],
        (CASE.name, "peer"): [run(1, 5)],
    }
    found = compare(runs, [CASE], ["retrograd", "retrograd-bf16"])
    assert [(c.ours, c.peer, c.rate.median, c.best) for c in found] == [
        ("retrograd", "peer", 2.0, True),
        ("retrograd-bf16", "peer", 4.0, True),
    ]


@pytest.mark.parametrize("missing", ["retrograd", "peer"])
def test_no_comparison_without_both(missing: str) -> None:
    runs = {(CASE.name, name): [run(1, 10)] for name in ("retrograd", "peer") if name != missing}
    assert compare(runs, [CASE], ["retrograd"]) == []


def test_summary_keeps_the_failure() -> None:
    [summary] = summarise({(CASE.name, "peer"): [run(1, 10, 7), failed(2, "out of memory")]})
    assert (summary.rounds, summary.failure) == (1, "out of memory")
    assert summary.rate == Spread(median=10, low=10, high=10)
    assert summary.peak_mb == Spread(median=7, low=7, high=7)
