"""The JSON and the Markdown of a report."""

from __future__ import annotations

import json

import attrs
import pytest
from benchmarks.cases import Case
from benchmarks.models import ModelWork
from benchmarks.runner import Runs
from benchmarks.tables import Report, to_json, to_markdown, work_per_unit

from .helpers import failed, run

SFT = Case(
    name="sft/smollm2/1x512",
    kind="sft",
    unit="tok/s",
    title="LoRA SFT step",
    model="smollm2",
    target=2.0,
    memory_target=1 / 3,
)
GEMM = Case(name="limit/gemm-float32", kind="gemm", unit="GFLOP/s", title="product")
WORK = ModelWork(body_weights=100_000_000, head_weights=25_000_000, read_bytes=80_000_000)
MACHINE = {
    "processor": "Some CPU",
    "features": ["avx2"],
    "cores": 2,
    "memory_gb": 16.0,
    "system": "Linux",
    "load_average": [0.5, 0.5, 0.5],
}


def report(runs: Runs) -> Report:
    return Report(
        machine=MACHINE,
        settings={"threads": 2, "rounds": 2, "steps": 3},
        cases=(GEMM, SFT),
        titles={"retrograd": "retrograd", "torch-bf16": "PyTorch, bf16", "numpy": "NumPy"},
        not_run={"llama.cpp": "node is not on the PATH"},
        runs=runs,
        work={"smollm2": WORK},
    )


def measured() -> Report:
    return report(
        {
            (GEMM.name, "numpy"): [run(1, 500), run(2, 500)],
            (SFT.name, "retrograd"): [run(1, 800, 400, others=0.2), run(2, 1000, 400, others=0.1)],
            (SFT.name, "torch-bf16"): [run(1, 400, 1600), run(2, 400, 1600)],
        }
    )


def line(text: str, start: str) -> list[str]:
    [found] = [row for row in text.splitlines() if row.startswith(f"| {start}")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_best_peer_row_with_verdicts() -> None:
    row = line(to_markdown(measured()), "SmolLM2-135M (Q4_1): LoRA SFT step")
    assert row[1:] == [
        "PyTorch, bf16",
        "2.25× (2–2.5)",
        "≥ 2×: reached",
        "0.25×",
        "≤ 0.333×: reached",
    ]


@pytest.mark.parametrize(
    ("rate", "peak", "speed", "memory"),
    [(799, 400, "not reached", "reached"), (800, 600, "reached", "not reached")],
)
def test_verdicts(rate: float, peak: float, speed: str, memory: str) -> None:
    runs = {(SFT.name, "retrograd"): [run(1, rate, peak)], (SFT.name, "torch-bf16"): [run(1, 400, 1600)]}
    row = line(to_markdown(report(runs)), "SmolLM2")
    assert (row[3].split(": ")[1], row[5].split(": ")[1]) == (speed, memory)


def test_share_of_the_limit() -> None:
    # 4 FLOP · 0.125e9 weights · 900 tok/s = 450 GFLOP/s of 500.
    [ours, _] = to_json(measured())["shares_of_limit"]
    assert ours["does"] == pytest.approx(450)
    assert ours["share"] == pytest.approx(0.9)


def test_everything_is_named() -> None:
    text = to_markdown(
        report({(SFT.name, "retrograd"): [run(1, 800)], (SFT.name, "torch-bf16"): [failed(1, "killed")]})
    )
    assert "- llama.cpp: node is not on the PATH" in text
    assert "- sft/smollm2/1x512, torch-bf16:\n\n    killed" in text
    assert "No case was measured with both" in text


def test_noise_is_told() -> None:
    assert "Other processes used 0.15 cores meanwhile (0.10–0.20)." in to_markdown(measured())


def test_json_is_plain_and_complete() -> None:
    data = json.loads(json.dumps(to_json(measured())))
    assert {(r["case"], r["contestant"]) for r in data["runs"]} == set(measured().runs)
    [comparison] = data["comparisons"]
    assert comparison["rate"] == {"median": 2.25, "low": 2.0, "high": 2.5}
    assert data["cases"][SFT.name]["target"] == 2.0


def test_work_of_generation_is_shared_by_the_batch() -> None:
    case = Case(name="g", kind="generate", unit="tok/s", title="", parameters={"sequences": 8, "tokens": 4})
    unit, amount = work_per_unit(case, WORK)
    assert unit == "GB/s"
    assert amount == pytest.approx(0.01)


def test_a_busy_machine_or_a_quick_run_is_not_judged() -> None:
    runs = {
        (SFT.name, "retrograd"): [run(1, 800, 400, others=1.5)],
        (SFT.name, "torch-bf16"): [run(1, 100, 1600, others=1.25)],
    }
    row = line(to_markdown(report(runs)), "SmolLM2")
    assert row[3] == "≥ 2×: not judged (others used 1.4 cores)"
    assert row[5] == "≤ 0.333×: reached"  # memory does not depend on the load
    quick = attrs.evolve(measured(), settings={"threads": 2, "rounds": 1, "steps": 2, "quick": True})
    assert line(to_markdown(quick), "SmolLM2")[3] == "≥ 2×: not judged (--quick)"
