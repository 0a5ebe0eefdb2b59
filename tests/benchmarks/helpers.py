"""Runs as the benchmarks' own processes would have reported them."""

from __future__ import annotations

from benchmarks.runner import Run


def run(number: int, rate: float, peak: float = 100.0, *, others: float | None = None) -> Run:
    return Run(
        round=number,
        figures={"rate": rate, "seconds": 1.0, "peak_mb": peak},
        others_cores=others,
    )


def failed(number: int, reason: str = "it ended with status 1\nTraceback …") -> Run:
    return Run(round=number, failure=reason)
