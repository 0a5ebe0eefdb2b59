"""Timing, memory and the result line of a measured process; and the work of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.limits import MIN_ARRAY_BYTES, array_bytes
from benchmarks.measure import PeakMemory, emit, time_steps
from benchmarks.models import LOCATORS, TITLES, model_work, resolve


def test_warmup_is_not_timed() -> None:
    now = 0.0
    pace = iter([100.0, 1.0, 2.0, 3.0])

    def step() -> None:
        nonlocal now
        now += next(pace)

    assert time_steps(step, warmup=1, steps=3, clock=lambda: now) == [1.0, 2.0, 3.0]


def test_result_line(capsys: pytest.CaptureFixture[str]) -> None:
    memory = PeakMemory()
    emit(
        seconds=[2.0, 4.0, 3.0],
        work=600,
        memory=memory,
        versions=("attrs", "no-such-distribution"),
        losses=[1.5],
    )
    line = json.loads(capsys.readouterr().out)
    assert (line["seconds"], line["rate"], line["samples"]) == (3.0, 200.0, [2.0, 4.0, 3.0])
    assert line["versions"]["no-such-distribution"] == "not installed"
    assert line["losses"] == [1.5]
    assert 5 < line["peak_mb"] <= line["process_peak_mb"]


def test_peak_memory_sees_an_allocation() -> None:
    memory = PeakMemory()
    memory.reset()
    before = memory.work_mb()
    block = bytearray(b"x") * (64 << 20)
    assert memory.work_mb() - before > 50
    del block
    assert memory.process_mb() >= memory.work_mb() > before + 50


@pytest.mark.parametrize(
    ("text", "size"), [("480M\n", 960 << 20), ("32768K\n", MIN_ARRAY_BYTES), ("9000M\n", 2 << 30)]
)
def test_array_is_larger_than_the_cache(tmp_path: Path, text: str, size: int) -> None:
    cache = tmp_path / "size"
    cache.write_text(text)
    assert array_bytes(cache) == size
    assert array_bytes(tmp_path / "missing") == MIN_ARRAY_BYTES


@pytest.mark.parametrize("tied", [True, False])
def test_work_of_a_model(tiny_model: Callable[..., Path], tied: bool) -> None:
    # 2 blocks of width 64, hidden 128, 4 heads over 2 key heads of 16: q, o 64·64; k, v 32·64; 3 of 128·64.
    work = model_work(tiny_model(architecture="llama", format="F32", tied_head=tied))
    body = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    assert work.body_weights == body
    assert work.head_weights % 64 == 0
    assert work.read_bytes == 4 * (body + work.head_weights)
    assert work.sft_gflop_per_token() == pytest.approx(4e-9 * (body + work.head_weights))
    assert work.prompt_gflop_per_token() == pytest.approx(2e-9 * body)


def test_models_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "gemma3.gguf").write_bytes(b"")
    assert resolve(["gemma3"], tmp_path) == {"gemma3": tmp_path / "gemma3.gguf"}
    with pytest.raises(FileNotFoundError, match=r"has no smollm2\.gguf"):
        resolve(["smollm2"], tmp_path)
    assert LOCATORS.keys() == TITLES.keys()
