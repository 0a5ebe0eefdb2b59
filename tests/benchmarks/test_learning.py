"""`benchmarks.learning`: what it reads of a run, what it writes, and its picture."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.learning_picture import draw, mean, ticks

from benchmarks import learning

SVG = "{http://www.w3.org/2000/svg}"
RECORDS = [
    {"step": 0, "time": 100.0, "eval/reward": 0.1, "eval/pass": 0.0},
    {
        "step": 1,
        "time": 101.0,
        "train/update": 1.0,
        "generation/tokens": 90.0,
        "completions/length_mean": 30.0,
    },
    {"step": 2, "time": 102.0, "train/update": 1.0},  # a second pass over the same answers
    {
        "step": 3,
        "time": 103.0,
        "train/update": 2.0,
        "generation/tokens": 60.0,
        "completions/length_mean": 20.0,
    },
    {"step": 3, "time": 104.5, "eval/reward": 0.6, "eval/pass": 0.5},
]


def run(seed: int, rewards: list[float]) -> dict[str, Any]:
    points = [
        {"update": 4 * i, "reward": reward, "seconds": 60.0 * i, "processor_seconds": 90.0 * i}
        for i, reward in enumerate(rewards)
    ]
    return {
        "seed": seed,
        "points": points,
        "wall_seconds": 120.0,
        "processor_seconds": 180.0,
        "answers": 64,
    }


def data(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"example": "grpo-a<b", "algorithm": "grpo", "processors": 2, "runs": list(runs)}


def test_points() -> None:
    before, after = learning.points(RECORDS, {0: 10.0, 1: 16.0, -1: 20.0})
    assert (before.update, before.reward, before.seconds, before.processor_seconds) == (0, 0.1, 0.0, 0.0)
    assert (after.update, after.reward, after.seconds, after.processor_seconds) == (2, 0.6, 4.5, 6.0)
    assert after.metrics == {"eval/reward": 0.6, "eval/pass": 0.5}


def test_answers_are_counted_once_an_update() -> None:
    assert learning.answers(RECORDS) == 6


def test_samples() -> None:
    lines: list[dict[str, Any]] = []
    for update, answer, reward in ((0, "no", 0.0), (4, "half", 0.5), (8, "yes", 1.0)):
        lines += [
            {"kind": "prompt", "group": "eval.0", "split": "eval", "messages": [{"content": "Well?"}]},
            {"kind": "rollout", "group": "eval.0", "update": update, "completion": answer},
            {"kind": "outcome", "group": "eval.0", "reward": {"kind": "value", "value": reward}},
            {"kind": "prompt", "group": "1.0", "split": "train", "messages": [{"content": "trained"}]},
            {"kind": "rollout", "group": "1.0", "update": update, "completion": "other"},
        ]
    assert learning.samples([json.dumps(line) for line in lines]) == [
        {
            "prompt": "Well?",
            "before": {"answer": "no", "reward": 0.0},
            "after": {"answer": "yes", "reward": 1.0},
        }
    ]


def test_summary() -> None:
    [_, _, row] = learning.summary(data(run(7, [0.1, 0.9, 0.8]))).splitlines()
    assert row == "| 7 | 0.10 | 0.80 | 0.90 | 8 | 64 | 2.0 | 3.0 |"


def test_mean_of_curves() -> None:
    assert mean([[(0, 0.0), (4, 1.0), (8, 1.0)], [(0, 1.0), (4, 0.5)]]) == [(0, 0.5), (4, 0.75)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.25, 1.0, [-0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 20.0, [0.0, 5.0, 10.0, 15.0, 20.0]),
        (0.0, 3.3, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),
        (2.0, 2.0, [2.0]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_picture() -> None:
    root = ElementTree.fromstring(draw(data(run(0, [0.0, 0.5, 1.0]), run(3, [0.2, 0.4, 0.6]))))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "grpo-a<b: mean held-out reward" in texts
    assert {"seed 0", "seed 3", "mean", "updates", "minutes of 2 cores"} <= set(texts)
    lines = [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter(f"{SVG}polyline")
    ]
    assert len(lines) == 5  # two seeds and their mean by update, two seeds by time
    first, second, both, *_ = lines
    width, height = (float(value) for value in root.attrib["viewBox"].split()[2:])
    assert all(0 <= x <= width and 0 <= y <= height for line in lines for x, y in line)
    assert [x for x, _ in first] == sorted(x for x, _ in first)
    assert first[0][1] > first[1][1] > first[2][1]  # a higher reward is higher up
    assert both[2][1] == pytest.approx((first[2][1] + second[2][1]) / 2, abs=0.1)


def test_picture_of_one_run_has_no_mean() -> None:
    root = ElementTree.fromstring(draw(data(run(0, [-0.5, 1.5]))))
    assert len(list(root.iter(f"{SVG}polyline"))) == 2
    assert "mean" not in [element.text for element in root.iter(f"{SVG}text")]


def example(folder: Path, model: Path, algorithm: str = "grpo", *, evaluation: bool = True) -> Path:
    folder.mkdir()
    for name, words in (("prompts", "abcd"), ("heldout", "xyz")):
        records = [{"messages": [{"role": "user", "content": f"say {word}"}]} for word in words]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "reward.py").write_text("def score(prompt, completion):\n    return len(completion) % 7 / 7\n")
    (folder / f"{algorithm}-toy.toml").write_text(
        f"""
        run = {{ algorithm = "{algorithm}" }}
        model = {{ path = "{model}", device = "reference" }}
        output = {{ path = "toy.gguf" }}
        lora = {{ rank = 2 }}
        training = {{ ctx = 128, micro_batch = 128 }}
        observe = {{ directory = "observed" }}
        {'evaluation = { data = "heldout.jsonl" }' if evaluation else ""}
        [grpo]
        prompts = "prompts.jsonl"
        reward = "python:./reward.py:score"
        updates = 2
        prompts_per_update = 1
        group_size = 4
        grpo_epochs = 1
        clip_range_low = 0.2
        clip_range_high = 0.28
        kl_coefficient = 0.0
        sampling = {{ temperature = 1.0, top_p = 1.0, max_new_tokens = 8, seed = 0 }}
        """
    )
    return folder


def test_whole_run(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = example(tmp_path / "grpo-toy", tiny_model())
    out = tmp_path / "out"
    arguments = ["--example", str(folder), "--out", str(out)]
    assert learning.main([*arguments, "--seeds", "0", "5", "--set", "training.lr=1e-3"]) == 0
    result = json.loads((out / "grpo-toy.json").read_text())
    assert [found["seed"] for found in result["runs"]] == [0, 5]
    assert result["set"] == ["training.lr=1e-3"]
    for found in result["runs"]:
        assert [point["update"] for point in found["points"]] == [0, 1, 2]
        assert found["answers"] == 8
        assert 8 <= found["tokens"] <= 64
        assert len(found["samples"]) == 3
        assert found["processor_seconds"] > 0
    first, second = (found["points"][0]["reward"] for found in result["runs"])
    assert first != second  # each seed draws its own answers
    assert "| 5 |" in capsys.readouterr().out
    # Only what a run asks for is written: nothing beside the example's own files.
    assert {path.name for path in folder.iterdir() if path.name != "__pycache__"} == {
        "grpo-toy.toml", "heldout.jsonl", "prompts.jsonl", "reward.py",
    }  # fmt: skip

    picture = (out / "grpo-toy.svg").read_text()
    (out / "grpo-toy.svg").unlink()
    assert learning.main([*arguments, "--redraw"]) == 0
    assert (out / "grpo-toy.svg").read_text() == picture


def test_a_run_that_fails_is_told(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = example(tmp_path / "grpo-toy", tiny_model())
    (folder / "reward.py").write_text("def score(prompt, completion):\n    return 0.5\n")
    assert learning.main(["--example", str(folder), "--seeds", "0", "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "with seed 0 ended with status 1" in told
    assert "all rewards are equal" in told


def test_wrong_examples(
    tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model()
    (tmp_path / "empty").mkdir()
    for folder, message in (
        (tmp_path / "empty", "has 0 TOML files"),
        (example(tmp_path / "sft", model, "sft"), "run.algorithm is 'sft'"),
        (example(tmp_path / "blind", model, evaluation=False), "has no [evaluation]"),
    ):
        assert learning.main(["--example", str(folder), "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["grpo-json", "grpo-sums", "ppo-sentence"])
def test_published_pictures_are_drawn_from_their_data(repo_root: Path, name: str) -> None:
    folder = repo_root / "docs" / "pictures"
    result = json.loads((folder / f"{name}.json").read_text())
    assert draw(result) == (folder / f"{name}.svg").read_text()
    readme = (repo_root / "examples" / name / "README.md").read_text()
    for found in result["runs"]:
        before, after = (found["points"][i]["reward"] for i in (0, -1))
        assert re.search(rf"\| {found['seed']} \| {before:.2f} \| {after:.2f} \|", readme)
