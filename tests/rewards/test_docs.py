"""docs/rewards.md: every block on the page is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from retrograd.plugins import Catalogue, PluginSession
from retrograd_hookspecs import Answer, BuildContext, Reward, Score
from retrograd_plugins.rewards import command as command_module
from tests.contrib import pip_install

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
HELLO = [Answer(prompt="Say hello", completion=text) for text in ("Hello!", "Hello, hello!")]
EXPECTED = [Score(kind="value", value=-0.06), Score(kind="value", value=-0.13)]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


FILES: dict[str, str] = dict(
    re.findall(r"`(\w+\.(?:py|toml))`[^`]*?:\n\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
)
RUN_TABLES = [text for text in blocks("toml") if text.startswith("[grpo]")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page in the directory of a TOML, and `python` on PATH."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def build(name: str, folder: Path, **keys: Any) -> Reward:
    component = PluginSession(Catalogue.installed()).component("rewards", name).component
    reward: Reward = component.build(component.config(**keys), BuildContext(config=None, base_dir=folder))
    return reward


def scores(reward: Reward, answers: list[Answer] = HELLO) -> list[Score]:
    try:
        return list(reward.score(answers))
    finally:
        reward.close()


def test_every_block_is_known() -> None:
    assert set(FILES) == {
        "rewards.py",
        "reward.py",
        "reward_model.py",
        "plain.py",
        "retrograd_reward_keywords.py",
        "pyproject.toml",
        "test_keywords.py",
    }
    assert len(blocks("python")) == len(FILES) - 1
    assert len(blocks("toml")) == len(RUN_TABLES) + 1
    counts = [len(RUN_TABLES), len(blocks("console")), len(blocks("jsonl"))]
    assert counts == [3, 1, 2]
    assert PAGE.count("```") == 2 * (len(blocks("python")) + len(blocks("toml")) + 3)


def test_functions(folder: Path) -> None:
    table = tomllib.loads(RUN_TABLES[0])["grpo"]
    kind, _, function = table.pop("reward").partition(":")
    assert (kind, table) == ("python", {})
    answers = [
        Answer(prompt="", completion=" 4\n", metadata={"answer": 4}),
        Answer(prompt="", completion="5", metadata={"answer": 4}),
        Answer(prompt="", completion="5"),
    ]
    assert [
        (score.kind, score.value) for score in scores(build(kind, folder, function=function), answers)
    ] == [
        ("value", 1.0),
        ("value", 0.0),
        ("missing", 0.0),
    ]
    assert scores(build("python", folder, function="rewards:length")) == EXPECTED
    (folder / "lib").mkdir()
    (folder / "rewards.py").rename(folder / "lib" / "rewards.py")
    [named] = set(re.findall(r'"python:(\./lib/[^"]*)"', PAGE))
    assert scores(build("python", folder, function=named)) == EXPECTED


@pytest.mark.parametrize("mode", ["persistent", "oneshot"])
@pytest.mark.parametrize("name", ["reward.py", "reward_model.py", "plain.py"])
def test_programs(folder: Path, name: str, mode: str) -> None:
    table = tomllib.loads(RUN_TABLES[1])["grpo"]
    assert table == {
        "reward_command": ["python", "reward.py"],
        "reward_mode": "persistent",
        "reward_timeout_seconds": 300,
    }
    program, _ = table["reward_command"]
    assert scores(build("command", folder, command=(program, name), mode=mode)) == EXPECTED
    # A copy of the helper beside the program, in an environment without retrograd.
    if name != "plain.py":
        helper = (ROOT / "retrograd_core" / "retrograd" / "reward_program.py").read_text()
        (folder / "reward_program.py").write_text(helper)
        (folder / name).write_text(FILES[name].replace("retrograd.reward_program", "reward_program"))
        alone = (program, "-S", name)
        assert scores(build("command", folder, command=alone, mode=mode)) == EXPECTED


def test_by_hand(folder: Path) -> None:
    [block] = blocks("console")
    command, output = block.removeprefix("$ ").split("\n", 1)
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == output


@pytest.mark.parametrize("name", ["reward.py", "plain.py"])
@pytest.mark.parametrize("number", [0, 1])
def test_transcripts(folder: Path, name: str, number: int) -> None:
    lines = blocks("jsonl")[number].splitlines()
    sent = "".join(f"{line[2:]}\n" for line in lines if line.startswith("→ "))
    received = [json.loads(line[2:]) for line in lines if line.startswith("← ")]
    assert len(received) + sent.count("\n") == len(lines)
    done = subprocess.run(
        [sys.executable, name], cwd=folder, input=sent, capture_output=True, text=True, check=True
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == received


def test_transcripts_are_what_is_sent(folder: Path) -> None:
    for number, mode in enumerate(("oneshot", "persistent")):
        log = folder / f"{mode}.log"
        tee = ("sh", "-c", f"tee {shlex.quote(str(log))} | python plain.py")
        assert scores(build("command", folder, command=tee, mode=mode)) == EXPECTED
        sent = [json.loads(line) for line in log.read_text().splitlines()]
        lines = blocks("jsonl")[number].splitlines()
        assert sent == [json.loads(line[2:]) for line in lines if line.startswith("→ ")]


def test_the_plugin(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path_factory.mktemp("retrograd-reward-keywords")
    for name in ("pyproject.toml", "retrograd_reward_keywords.py", "test_keywords.py"):
        (project / name).write_text(FILES[name], encoding="utf-8")
    site = pip_install(project, tmp_path_factory.mktemp("keywords"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    monkeypatch.syspath_prepend(str(site))
    table = tomllib.loads(RUN_TABLES[2])
    name = table["grpo"]["reward"]
    keys = {key: tuple(value) for key, value in table["reward"][name].items()}
    answers = [Answer(prompt="", completion=text) for text in ("Blue salt", "blue", "red")]
    assert [score.value for score in scores(build(name, folder, **keys), answers)] == [1.0, 0.5, 0.0]


def test_the_figures_of_the_page() -> None:
    assert f"after {command_module.GRACE_SECONDS:g} seconds" in PAGE
    assert "at most 8 MiB (8 388 608 bytes)" in PAGE
