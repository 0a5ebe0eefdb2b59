"""The report: one JSON with everything, one Markdown with the tables a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from .cases import Case
from .contestants import names_of_ours
from .models import TITLES, ModelWork
from .runner import QUIET_CORES, Runs
from .statistics import Comparison, Spread, Summary, compare, summarise

OURS = "retrograd"


@attrs.frozen(kw_only=True)
class Report:
    """Everything that a session of benchmarks found out."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    cases: Sequence[Case]
    titles: Mapping[str, str]
    """Contestants' names to what they are."""
    not_run: Mapping[str, str]
    """Contestants that cannot run here, and why."""
    runs: Runs
    work: Mapping[str, ModelWork] = attrs.field(factory=dict)
    """By model."""
    summaries: list[Summary] = attrs.field(init=False)
    comparisons: list[Comparison] = attrs.field(init=False)

    @summaries.default
    def _summarised(self) -> list[Summary]:
        return summarise(self.runs)

    @comparisons.default
    def _compared(self) -> list[Comparison]:
        return compare(self.runs, self.cases, names_of_ours())

    def failures(self) -> list[Summary]:
        """Contestants that failed a case."""
        return [summary for summary in self.summaries if summary.failure]


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON values."""
    return {
        "machine": dict(report.machine),
        "settings": dict(report.settings),
        "not_run": dict(report.not_run),
        "cases": {case.name: attrs.asdict(case) for case in report.cases},
        "summaries": [attrs.asdict(summary) for summary in report.summaries],
        "comparisons": [attrs.asdict(comparison) for comparison in report.comparisons],
        "shares_of_limit": [dict(zip(_SHARE_KEYS, row, strict=True)) for row in _shares(report)],
        "runs": [
            {"case": case, "contestant": contestant, **attrs.asdict(run)}
            for (case, contestant), done in report.runs.items()
            for run in done
        ],
    }


def to_markdown(report: Report) -> str:
    """The report as Markdown."""
    parts = [
        "# Benchmarks",
        _machine_text(report),
        "## Against the best peer",
        "Median over the rounds of retrograd's rate divided by the fastest peer's in the same round"
        " (least–greatest), and the same of peak memory.",
        _best_table(report),
        "## Every contestant",
        "`ratio` is retrograd's rate divided by the contestant's, `memory ratio` the same of peak memory.",
        _all_table(report),
    ]
    if shares := _shares(report):
        parts += [
            "## Distance to the machine's limits",
            "The arithmetic of the weights alone (4 FLOP a weight and token in LoRA training, 2 in prompt"
            " processing, every stored byte read once a generation step), as a share of the fastest matrix"
            " product and of the read bandwidth measured in the same session.",
            _table(
                ("case", "contestant", "does", "unit", "limit", "share"),
                [(*row[:2], _number(row[2]), row[3], _number(row[4]), f"{row[5]:.0%}") for row in shares],
            ),
        ]
    if report.not_run:
        parts += ["## Not run", *(f"- {name}: {reason}" for name, reason in report.not_run.items())]
    if failures := report.failures():
        parts.append("## Failed")
        parts += [f"- {s.case}, {s.contestant}:\n\n{_indented(s.failure)}" for s in failures]
    return "\n\n".join(part for part in parts if part) + "\n"


def _best_table(report: Report) -> str:
    rows = []
    by_name = {case.name: case for case in report.cases}
    for comparison in report.comparisons:
        case = by_name[comparison.case]
        if not comparison.best:
            continue
        setting = "" if comparison.ours == OURS else f"; {report.titles[comparison.ours]}"
        rows.append(
            (
                _case_title(case) + setting,
                report.titles[comparison.peer],
                _spread(comparison.rate, "×"),
                _verdict(
                    case.target, comparison.rate.median, at_least=True, doubt=_doubt(report, comparison)
                ),
                _spread(comparison.memory, "×"),
                _verdict(case.memory_target, comparison.memory.median, at_least=False),
            )
        )
    return (
        _table(("case", "best peer", "ratio", "wanted", "memory ratio", "wanted"), rows)
        if rows
        else ("No case was measured with both retrograd and a peer.")
    )


def _all_table(report: Report) -> str:
    compared = {(c.case, c.peer): c for c in report.comparisons if c.ours == OURS}
    by_name = {case.name: case for case in report.cases}
    rows = []
    for summary in report.summaries:
        if summary.rate is None or summary.peak_mb is None:
            continue
        case = by_name[summary.case]
        comparison = compared.get((summary.case, summary.contestant))
        rows.append(
            (
                case.name,
                report.titles[summary.contestant],
                f"{_spread(summary.rate)} {case.unit}",
                f"{summary.peak_mb.median:.0f} MB",
                _spread(comparison.rate, "×") if comparison else "",
                _spread(comparison.memory, "×") if comparison else "",
            )
        )
    return _table(("case", "contestant", "rate", "peak memory", "ratio", "memory ratio"), rows)


_SHARE_KEYS = ("case", "contestant", "does", "unit", "limit", "share")


def _shares(report: Report) -> list[tuple[str, str, float, str, float, float]]:
    limits: dict[str, float] = {}
    units = {case.name: case.unit for case in report.cases if case.name.startswith("limit/")}
    for summary in report.summaries:
        if summary.case in units and summary.rate is not None:
            unit = units[summary.case]
            limits[unit] = max(limits.get(unit, 0.0), summary.rate.median)
    by_name = {case.name: case for case in report.cases}
    rows = []
    for summary in report.summaries:
        case = by_name[summary.case]
        work = report.work.get(case.model)
        if summary.rate is None or work is None:
            continue
        unit, amount = work_per_unit(case, work)
        if unit in limits:
            does = amount * summary.rate.median
            rows.append((case.name, summary.contestant, does, unit, limits[unit], does / limits[unit]))
    return rows


def work_per_unit(case: Case, work: ModelWork) -> tuple[str, float]:
    """What a token costs at least, in GFLOP or GB: the unit is that of the limit which bounds the case."""
    if case.kind == "sft":
        return "GFLOP/s", work.sft_gflop_per_token()
    if case.kind == "prompt":
        return "GFLOP/s", work.prompt_gflop_per_token()
    if case.kind == "generate":
        return "GB/s", work.generation_gb_per_step() / case.number("sequences")
    return "", 0.0


def _machine_text(report: Report) -> str:
    machine, settings = report.machine, report.settings
    interrupted = " (interrupted)" if settings.get("interrupted") else ""
    load = ", ".join(str(value) for value in machine["load_average"])
    return (
        f"{machine['processor']} ({', '.join(machine['features']) or 'no known features'}),"
        f" {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}."
        f" {settings['threads']} threads, {settings['rounds']} rounds of {settings['steps']} timed steps,"
        f" contestants in turn{interrupted}. Load average at the start: {load}.{_others_text(report)}"
    )


def _others_text(report: Report) -> str:
    shares = [
        run.others_cores for done in report.runs.values() for run in done if run.others_cores is not None
    ]
    spread = Spread.of(shares)
    if spread is None:
        return ""
    return f" Other processes used {spread.median:.2f} cores meanwhile ({spread.low:.2f}–{spread.high:.2f})."


def _case_title(case: Case) -> str:
    return f"{TITLES[case.model]}: {case.title}" if case.model else case.title


def _verdict(target: float | None, value: float, *, at_least: bool, doubt: str = "") -> str:
    if target is None:
        return ""
    reached = value >= target if at_least else value <= target
    said = doubt or ("reached" if reached else "not reached")
    return f"{'≥' if at_least else '≤'} {target:.3g}×: {said}"


def _doubt(report: Report, comparison: Comparison) -> str:
    """Why a ratio of rates says neither that a target is reached nor that it is not, or ""."""
    if report.settings.get("quick"):
        return "not judged (--quick)"
    shares = [
        run.others_cores
        for name in (comparison.ours, comparison.peer)
        for run in report.runs[comparison.case, name]
        if run.others_cores is not None
    ]
    # Peers that spin at barriers lose far more than their share on a busy machine: that is no result.
    busy = Spread.of(shares)
    if busy is not None and busy.median > QUIET_CORES:
        return f"not judged (others used {busy.median:.1f} cores)"
    return ""


def _spread(spread: Spread, suffix: str = "") -> str:
    if spread.low == spread.high:
        return f"{_number(spread.median)}{suffix}"
    return f"{_number(spread.median)}{suffix} ({_number(spread.low)}–{_number(spread.high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.strip().splitlines())
