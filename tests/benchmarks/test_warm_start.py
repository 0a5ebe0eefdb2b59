"""`benchmarks.warm_start`: the commands of the chain, what it reads of them, and its picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import attrs
import pytest
from benchmarks.warm_start_picture import draw

from benchmarks import warm_start

SVG = "{http://www.w3.org/2000/svg}"
TOTALS = {"attempts": 512, "passed": 130, "traces": 40}


def run(seed: int, rewards: list[float]) -> dict[str, Any]:
    stages = {name: {"eval/reward": reward} for name, reward in zip(warm_start.STAGES, rewards, strict=True)}
    return {
        "seed": seed,
        "stages": stages,
        "collected": TOTALS,
        "curve": [(0, rewards[2]), (6, 0.7), (12, rewards[3])],
        "commands": [{"command": "train demos.toml", "seconds": 30.0, "processor_seconds": 45.0}] * 4,
    }


@attrs.define
class Recorded(warm_start.Commands):
    """Commands that are written down; a stage is worth 0.25 more than the one before."""

    lines: list[str] = attrs.field(factory=list)

    def run(self, command: str, toml: str, *arguments: object, **assignments: object) -> str:
        self.lines.append(" ".join(map(str, (command, toml, *arguments, *assignments.items()))))
        if command == "collect":
            self.file("pass.json").write_text(json.dumps({"totals": TOTALS}))
        if toml == "agent.toml" and command == "train":
            records = [
                {"step": 0, "time": 1.0, "eval/reward": 0.5, "eval/pass": 0.4},
                {"step": 1, "time": 2.0, "train/update": 1.0},
                {"step": 1, "time": 3.0, "eval/reward": 0.625},
                {"step": 2, "time": 4.0, "train/update": 2.0},
                {"step": 2, "time": 5.0, "eval/reward": 0.75},
            ]
            lines = "".join(json.dumps(record) + "\n" for record in records)
            self.file("agent.metrics.jsonl").write_text(lines)
        return json.dumps({"base": {"eval/reward": 0.0}, "adapter": {"eval/reward": 0.25}})


def test_the_chain(tmp_path: Path) -> None:
    commands = Recorded(warm_start.EXAMPLE, tmp_path, 7, [])
    chain = warm_start.run_chain(commands)
    assert [line.split()[:2] for line in commands.lines] == [
        ["train", "demos.toml"],
        ["bench", "agent.toml"],
        ["collect", "agent.toml"],
        ["train", "warm.toml"],
        ["train", "agent.toml"],
    ]
    assert [metrics["eval/reward"] for metrics in chain.stages.values()] == [0.0, 0.25, 0.5, 0.75]
    assert list(chain.stages) == list(warm_start.STAGES)
    assert chain.stages["collected traces"] == {"eval/reward": 0.5, "eval/pass": 0.4}
    assert chain.curve == [(0, 0.5), (1, 0.625), (2, 0.75)]
    assert chain.collected == TOTALS
    assert all("7" in line for line in commands.lines), "a command without the seed"


def test_a_command_that_fails(tmp_path: Path) -> None:
    commands = warm_start.Commands(tmp_path, tmp_path, 0, [])
    with pytest.raises(
        warm_start.RunError, match=r"train .*none\.toml ended with status 2:\n(.|\n)*none\.toml"
    ):
        commands.run("train", "none.toml")


def test_seeds_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    def chain(commands: warm_start.Commands) -> warm_start.Chain:
        trained.append(commands.seed)
        return warm_start.Chain(**run(commands.seed, [0.0, 0.25, 0.5, 0.75]))

    monkeypatch.setattr(warm_start, "run_chain", chain)
    assert warm_start.main(["--redraw", "--out", str(tmp_path)]) == 1  # nothing is there to be drawn
    for seeds in (["2"], ["0", "2"]):
        assert warm_start.main(["--add", "--out", str(tmp_path), "--seeds", *seeds]) == 0
    assert trained == [2, 0]
    data = json.loads((tmp_path / "warm-start.json").read_text())
    assert [found["seed"] for found in data["runs"]] == [0, 2]
    assert (tmp_path / "warm-start.svg").is_file()


def test_the_picture() -> None:
    data = {"example": "warm-start", "runs": [run(0, [0.0, 0.25, 0.5, 0.75]), run(1, [0.0, 0.2, 0.6, 0.95])]}
    picture = ElementTree.fromstring(draw(data))
    texts = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"seed 0", "seed 1", "mean", *warm_start.STAGES, "0.85"} <= set(texts)
    # The ground, and a bar for each seed at each stage.
    assert len(list(picture.iter(f"{SVG}rect"))) == 1 + 2 * len(warm_start.STAGES)
    assert len(list(picture.iter(f"{SVG}polyline"))) == 3
    assert warm_start.summary(data).splitlines()[2:] == [
        "| 0 | 0.00 | 0.25 | 0.50 | 0.75 | 130 of 512, 40 traces | 3.0 |",
        "| 1 | 0.00 | 0.20 | 0.60 | 0.95 | 130 of 512, 40 traces | 3.0 |",
    ]


def test_the_pictures_of_the_documentation_are_redrawn_from_their_data(tmp_path: Path) -> None:
    pictures = warm_start.ROOT / "docs" / "pictures"
    text = (pictures / "warm-start.json").read_text()
    (tmp_path / "warm-start.json").write_text(text)
    assert warm_start.main(["--redraw", "--pictures", str(tmp_path)]) == 0
    assert (tmp_path / "warm-start.svg").read_text() == (pictures / "warm-start.svg").read_text()
