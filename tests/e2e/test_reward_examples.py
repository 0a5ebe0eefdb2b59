"""The examples of learning from rewards: what their rewards promise, their data, and a short run of each."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from retrograd.metrics import read_metrics

from .support import retrograd

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("grpo-json", "grpo-sums", "ppo-sentence")


def load(example: str, name: str) -> ModuleType:
    """A module of an example, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"{example}/{name}", EXAMPLES / example / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"name": "Emma", "age": 24, "city": "Berlin"}', 1.0),
        (
            '\n{\n  "city": "Berlin",\n  "age": 24,\n  "name": "Emma"\n}\n',
            1.0,
        ),  # order and space do not count
        ('```json\n{"name": "Emma", "age": 24, "city": "Berlin"}\n```', 0.8),  # a code fence
        ('{"name": "Emma", "age": 24, "city": "Berlin"}\nEmma is 24.', 0.8),  # text behind
        ('Here: {"name": "Emma", "age": 24, "city": "Berlin"}', 0.8),  # text before
        ('{"name": "Emma", "age": "24", "city": "Berlin"}', 0.8),  # a number as a string
        ('{"name": "Emma", "age": 25, "city": "Germany"}', 0.6),  # two wrong values
        ('{"name": "Emma", "age": 24}', 0.7),  # a key is missing: its value and the set of keys
        ('{"name": "Emma", "age": 24, "city": "Berlin", "id": 1}', 0.9),  # a key too many
        ("{}", 0.3),
        ('{"name": true, "age": true, "city": true}', 0.4),
        ('{"name": "Emma", "age": 24, "city": "Ber', 0.0),  # cut
        ("{'name': 'Emma'}", 0.0),  # Python, not JSON
        ('["Emma", 24, "Berlin"]', 0.0),
        ("Emma", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ('{"a":' * 100_000, 0.0),
    ],
)
def test_json_reward(answer: str, reward: float) -> None:
    score = load("grpo-json", "reward").score
    metadata = {"expected": {"name": "Emma", "age": 24, "city": "Berlin"}}
    assert score("Emma is 24 years old.", answer, metadata=metadata) == pytest.approx(reward, abs=1e-9)


def test_json_reward_is_missing_where_nothing_is_expected() -> None:
    assert load("grpo-json", "reward").score("Emma is 24.", "{}", metadata={}) is None


def test_json_reward_of_a_number_that_is_not_the_expected_type() -> None:
    score = load("grpo-json", "reward").score
    assert score("", '{"hour": true}', metadata={"expected": {"hour": 1}}) == 0.4  # `true` is not 1
    assert score("", '{"hour": 1.0}', metadata={"expected": {"hour": 1}}) == 0.4
    assert score("", '{"hour": 1}', metadata={"expected": {"hour": 1}}) == 0.6


SENTENCES = [
    ("The river is very cold today.", 1.0),
    ("The River is very cold today.", 1.0),
    (" The river is cold in winter.\n", 1.0),
    ("The river is cold.", 0.94),  # four words: a fifth of 0.3 less
    ("River.", 0.76),
    ("The cold lake is very deep.", 0.6),  # not the word
    ("The rivers are very cold today.", 0.6),  # another word
    ("the river is very cold today.", 0.7),  # no capital
    ("The river is very cold today", 0.7),  # no full stop
    ("The river is cold. It is deep.", 0.7),  # two sentences
    ("The river that I saw last year was cold and wide.", 0.97),  # eleven words
    ("The river " + "and the sea " * 7 + "are cold.", 0.7),  # twenty-five words
    ("Yes", 0.06),
    ("", 0.0),
    ("...", 0.0),
]


@pytest.mark.parametrize(("answer", "reward"), SENTENCES)
def test_sentence_reward(answer: str, reward: float) -> None:
    score = load("ppo-sentence", "reward").score
    assert score('Write one short sentence with the word "river".', answer) == pytest.approx(reward)


def test_sentence_reward_needs_a_word() -> None:
    with pytest.raises(ValueError, match="names no word: 'Say hello'"):
        load("ppo-sentence", "reward").score("Say hello", "Hello.")


def test_sentence_reward_is_a_program() -> None:
    prompt = 'Write one short sentence with the word "river".'
    lines = "".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for answer, _ in SENTENCES)
    program = EXAMPLES / "ppo-sentence" / "reward.py"
    replies = subprocess.run(
        [sys.executable, program], input=lines, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    rewards = [json.loads(line)["reward"] for line in replies.splitlines()]
    assert rewards == pytest.approx([reward for _, reward in SENTENCES])


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("58", 1.0),
        ("41 + 17 = 58.", 1.0),
        ("58 is the sum of 41 and 17", 0.0),  # the last number counts
        ("41 + 17 = 57", 0.0),
        ("580", 0.0),
        ("It is fifty-eight.", 0.0),
        ("", 0.0),
    ],
)
def test_sums_reward(answer: str, reward: float) -> None:
    score = load("grpo-sums", "reward").score
    assert score("What is 41 + 17?", answer, metadata={"sum": 58}) == reward
    assert score("What is 41 + 17?", answer, metadata={}) is None


@pytest.mark.parametrize("name", NAMES)
def test_data_is_what_make_data_writes(name: str, tmp_path: Path) -> None:
    load(name, "make_data").write(tmp_path)
    for file in ("prompts.jsonl", "heldout.jsonl"):
        assert (tmp_path / file).read_text() == (EXAMPLES / name / file).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_held_out_prompts_are_not_trained_on(name: str) -> None:
    def prompts(file: str) -> set[str]:
        return {record["messages"][-1]["content"] for record in records(EXAMPLES / name / file)}

    assert len(prompts("heldout.jsonl")) == len(records(EXAMPLES / name / "heldout.jsonl"))
    assert not prompts("prompts.jsonl") & prompts("heldout.jsonl")


def test_held_out_facts_are_new() -> None:
    folder = EXAMPLES / "grpo-json"
    values = [
        {value for record in records(folder / file) for value in record["expected"].values()}
        for file in ("prompts.jsonl", "heldout.jsonl")
    ]
    words = [{value for value in of if isinstance(value, str)} for of in values]
    assert words[1]
    assert not words[0] & words[1]


def test_held_out_sums_are_new_and_right() -> None:
    folder = EXAMPLES / "grpo-sums"
    pairs = []
    for file in ("prompts.jsonl", "heldout.jsonl"):
        found = set()
        for record in records(folder / file):
            a, b = map(int, re.findall(r"\d+", record["messages"][-1]["content"]))
            assert a + b == record["sum"]
            found.add(frozenset((a, b)))
        pairs.append(found)
    assert not pairs[0] & pairs[1]


@pytest.mark.parametrize("name", NAMES)
def test_short_run(tmp_path: Path, smollm2_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in an activated environment: `python` is the one in which retrograd is installed.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    folder = shutil.copytree(EXAMPLES / name, tmp_path / "example")
    algorithm, _, task = name.partition("-")
    settings = {"evaluation.max_examples": 4, f"{algorithm}.updates": 1}
    if algorithm == "grpo":
        settings |= {"grpo.prompts_per_update": 1, "grpo.group_size": 4}
    else:
        settings |= {"ppo.rollout_batch_size": 4}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    options += ["--model", str(smollm2_path), "--device", "cpu"]
    toml = folder / f"{name}.toml"
    # Four answers to hard sums may all be wrong, and then there is nothing to learn from.
    ended = retrograd("train", toml, *options, code=None if task == "sums" else 0)
    assert ended.code == 0 or "all rewards are equal" in ended.err
    metrics = list(read_metrics(folder / f"{task}.metrics.jsonl"))
    before, *_ = (record for record in metrics if "eval/reward" in record)
    assert 0.0 <= before["eval/reward"] < 0.7
    assert before["eval/unscored_fraction"] == 0
    update = next(record for record in metrics if "reward/mean" in record)
    assert update["reward/missing_fraction"] == update["reward/error_fraction"] == 0
    assert (folder / "observed" / "index.html").is_file()
    if ended.code == 0:
        assert update["optimizer/grad_norm"] > 0
        assert (folder / f"{task}.gguf").is_file()


PAGE = Path(__file__).resolve().parents[2] / "docs" / "learning-from-rewards.md"


def blocks(language: str) -> list[str]:
    """Code blocks of the page."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def test_the_page_shows_what_the_example_says() -> None:
    example = tomllib.loads((EXAMPLES / "grpo-json" / "grpo-json.toml").read_text(encoding="utf-8"))
    shown = [tomllib.loads(block) for block in blocks("toml")]
    assert shown
    for tables in shown:
        for name, table in tables.items():
            for key, value in table.items():
                if isinstance(value, dict):
                    assert value.items() <= example[name][key].items()
                else:
                    assert example[name][key] == value
    [record] = blocks("json")
    assert json.loads(record) in records(EXAMPLES / "grpo-json" / "heldout.jsonl")


def test_commands_of_the_page_and_the_readmes_name_files_that_exist() -> None:
    root = PAGE.parents[1]
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    named = {line.split()[2] for line in commands if line.startswith("retrograd ")}
    assert named == {"grpo-json.toml", "observed"}
    for name in NAMES:
        readme = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
        commands += [line.strip() for line in readme.splitlines() if line.startswith("    ")]
        assert f"    retrograd train {name}.toml" in readme
    folders = [line.split("--example ")[1].split()[0] for line in commands if "--example " in line]
    assert set(folders) == {f"examples/{name}" for name in NAMES}
    assert all((root / folder).is_dir() for folder in folders)
    entered = [line.removeprefix("cd ") for line in commands if line.startswith("cd ")]
    assert entered
    assert all((root / folder).is_dir() for folder in entered)
    pictures = re.findall(r"\((pictures/[^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert {Path(path).stem for path in pictures} == set(NAMES)
    assert all((PAGE.parent / path).is_file() for path in pictures)
