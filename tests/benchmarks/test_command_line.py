"""Parsing of the command line, and what it chooses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import main, parser
from benchmarks.contestants import Options
from benchmarks.runner import ROOT

from benchmarks import cases, contestants


def options(**changes: object) -> Options:
    values: dict[str, object] = {
        "models": {"smollm2": Path("m.gguf")},
        "cache": Path("cache"),
        "threads": 3,
        "steps": 5,
        "warmup": 1,
    }
    return Options(**(values | changes))  # type: ignore[arg-type]


def test_lists_are_split() -> None:
    args = parser().parse_args(["--cases", "sft/*, limit/*", "--contestants", "torch-*", "--rounds", "4"])
    assert args.cases == ["sft/*", "limit/*"]
    assert args.contestants == ["torch-*"]
    assert args.rounds == 4


@pytest.mark.parametrize("flag", ["--rounds", "--steps", "--threads"])
def test_counts_are_positive(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([flag, "0"])
    assert "not at least 1" in capsys.readouterr().err


def test_case_names_are_unique_and_complete() -> None:
    everything = cases.all_cases()
    names = [case.name for case in everything]
    assert len(set(names)) == len(names)
    for model in ("smollm2", "gemma3"):
        shapes = {n for n in names if n.startswith(f"sft/{model}/")}
        assert shapes == {f"sft/{model}/{shape}" for shape in ("1x512", "4x512", "1x2048")}
        assert {f"generate/{model}/{n}x128" for n in (1, 8, 16)} <= set(names)


def test_quick_is_a_part_but_a_named_case_stays() -> None:
    everything = cases.all_cases()
    quick = cases.select(everything, [], quick=True)
    assert 0 < len(quick) < len(cases.select(everything, []))
    [named] = cases.select(everything, ["sft/smollm2/1x2048"], quick=True)
    assert named not in quick


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", "nothing/*"]) == 2
    assert "no case matches nothing/*" in capsys.readouterr().err
    assert main(["--contestants", "tensorflow"]) == 2
    assert "no contestant matches tensorflow; there are retrograd," in capsys.readouterr().err


def test_missing_model_directory_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = ["--models", str(tmp_path), "--cases", "prompt/smollm2/512", "--contestants", "retrograd"]
    assert main(request) == 2
    assert "has no smollm2.gguf" in capsys.readouterr().err


def test_contestant_asked_for_by_name_must_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = ["--contestants", "llama.cpp", "--node-dir", str(tmp_path), "--cases", "prompt/*"]
    assert main(request) == 2
    assert "cannot run here: llama.cpp:" in capsys.readouterr().err


def test_every_case_has_its_contestants() -> None:
    expected = {
        "sft": {
            "retrograd",
            "retrograd-bf16",
            "torch-float32",
            "torch-autocast",
            "torch-bf16",
            "torch-bf16-compiled",
        },
        "prompt": {"retrograd", "llama.cpp"},
        "generate": {"retrograd", "llama.cpp"},
        "grpo": {"retrograd", "retrograd-bf16", "trl-float32", "trl-bfloat16"},
        "bandwidth": {"numpy"},
    }
    for case in cases.all_cases():
        running = {c.name for c in contestants.all_contestants() if c.runs(case)}
        if case.name == "limit/gemm-bfloat16":
            assert running == {"torch"}
        elif case.kind == "gemm":
            assert running == {"numpy", "torch"}
        else:
            assert running == expected[case.kind], case.name


def test_commands_carry_the_parameters() -> None:
    case = next(case for case in cases.all_cases() if case.name == "generate/smollm2/8x128")
    by_name = {c.name: c for c in contestants.all_contestants()}
    command = by_name["retrograd"].command(case, options(max_tokens=32))
    flags = dict(zip(command[3::2], command[4::2], strict=True))
    assert flags == {
        "--model": "m.gguf",
        "--prompt": "128",
        "--sequences": "8",
        "--tokens": "32",
        "--threads": "3",
        "--steps": "5",
        "--warmup": "1",
    }
    assert by_name["llama.cpp"].command(case, options(node_dir=Path("n")))[-1].startswith('{"nodeDir": "n"')


def test_converted_model_is_made_once(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"1234")
    case = next(case for case in cases.all_cases() if case.name == "sft/smollm2/1x512")
    torch = next(c for c in contestants.all_contestants() if c.name == "torch-float32")
    there = options(models={"smollm2": gguf}, cache=tmp_path, torch_python="python")
    command = torch.prepare(case, there)
    assert command is not None
    target = Path(command[-1])
    target.mkdir()
    (target / "config.json").write_text("{}")
    assert torch.prepare(case, there) is None
    gguf.write_bytes(b"12345")  # another model under the same name
    assert torch.prepare(case, there) is not None


def test_an_interrupted_run_reports_and_leaves_nothing_behind(tmp_path: Path) -> None:
    request = ["--cases", "limit/gemm-float32", "--contestants", "numpy", "--rounds", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *request, "--out", str(tmp_path), "--steps", "1"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        first = process.stderr.readline()  # one run is done, the next one is under way
        process.terminate()
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert "round 1/100000  limit/gemm-float32  numpy:" in first
    assert "interrupted: the report holds what was measured" in rest
    assert process.returncode == 130
    data = json.loads((tmp_path / "benchmarks.json").read_text())
    assert data["settings"]["interrupted"] is True
    assert len(data["runs"]) >= 1
    assert "GFLOP/s" in (tmp_path / "benchmarks.md").read_text()
