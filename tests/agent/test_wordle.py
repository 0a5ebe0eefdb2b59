"""`contrib/retrograd-env-wordle`, installed as a user would: its rules, its mistakes, and a run."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import anyio
import pytest

from retrograd_hookspecs import Scenario
from tests.algorithms.support import watched
from tests.contrib import CONTRIB, pip_install

from .support import EVERY, Agents, call

PROJECT = CONTRIB / "retrograd-env-wordle"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pip_install(PROJECT, tmp_path_factory.mktemp("wordle"))


@pytest.fixture(autouse=True)
def _installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))


def scenario(answer: Any = "crane", **env: Any) -> dict[str, Any]:
    return {"id": str(answer), "user": "Find the word.", "metadata": {"env": {"answer": answer, **env}}}


def guess(word: str) -> str:
    return call("guess", word=word)


def wordle(agents: Agents, environment: dict[str, Any] | None = None, **agent: Any) -> Path:
    table = {"type": "wordle", **(environment or {})}
    keys = {"environment": table, "scenarios_per_update": 1, "group_size": 2, "max_turns": 8, **agent}
    return agents.agent(agent=keys)


@pytest.mark.parametrize(
    ("word", "answer", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("speed", "abide", "--Y-Y"),
        ("eerie", "three", "Y-G-G"),  # two of its three e's are there: one at its place, one elsewhere
        ("llama", "small", "YYGY-"),
        ("sassy", "glass", "YY-G-"),
        ("aaaaa", "crane", "--G--"),
        ("zzzzz", "crane", "-----"),
    ],
)
def test_marks_with_repeated_letters(word: str, answer: str, expected: str) -> None:
    from retrograd_env_wordle.game import marks

    assert marks(word, answer) == expected


def test_examples_in_docstrings_hold() -> None:
    from retrograd_env_wordle import game

    assert doctest.testmod(game).failed == 0


def test_a_game_that_is_won_and_one_that_is_lost(agents: Agents) -> None:
    agents.scenarios([scenario()])
    agents.script(
        {
            0: [guess("slate"), guess("toolong"), guess("CRANE")],
            EVERY: [guess("zzzzz"), guess("caner")],
        }
    )
    environment = {"guesses": 2, "partial_credit": 0.5}
    watch = watched(wordle(agents, environment))
    [group] = watch.groups[0]
    won, lost = group.members
    assert [m.content for m in won.messages if m.role == "tool"] == [
        "--G-G\n1 guesses are left.",
        "a guess has 5 letters; this guess does not count",
        "GGGGG\nYou found it.",
    ]
    assert won.total == 1.0
    assert lost.messages[-1].content == "GYYYY\nNo guesses are left. The word was crane."
    assert lost.total == pytest.approx(0.5 * (1 + 4 * 0.5) / 5)
    assert lost.final_state == "zzzzz -----\ncaner GYYYY"
    assert group.messages[-1].content == "Find the word.\n\nThe word has 5 letters. You have 2 guesses."
    assert watch.reports[0].metrics["batch/answers_trained"] == 2.0


def test_the_seed_of_a_group_chooses_the_word() -> None:
    from retrograd_env_wordle.plugin import Wordle, WordleConfig

    async def answer(seed: int) -> str:
        world = Wordle(WordleConfig(), ["apple", "bread", "chess", "dwarf"])
        await world.reset(Scenario(id="any", user=""), seed)
        return world._answer

    assert [anyio.run(answer, seed) for seed in (0, 1, 5, 7)] == ["apple", "bread", "bread", "dwarf"]


@pytest.mark.parametrize(
    ("environment", "env", "words"),
    [
        ({"guesses": 0}, {}, ["agent.environment.guesses", "at least 1"]),
        ({"partial_credit": 2.0}, {}, ["agent.environment.partial_credit", "at most 1"]),
        ({"guess": 3}, {}, ["guess", "guesses"]),
        ({"words": "words.txt"}, {}, ["'tw0' is not a word", "words.txt"]),
        ({"words": "nowhere.txt"}, {}, ["nowhere.txt"]),
        ({}, {"answer": 5}, ["scenarios.jsonl:1", "the answer 5 is not a word"]),
        ({}, {"answr": "x"}, ["scenarios.jsonl:1", "unknown key 'answr'; known: 'answer'"]),
        ({}, {"answer": None}, ["names no answer, and [agent.environment].words is not given"]),
    ],
)
def test_mistakes(agents: Agents, environment: dict[str, Any], env: dict[str, Any], words: list[str]) -> None:
    (agents / "words.txt").write_text("one\ntw0\n")
    agents.scenarios([scenario(**env) if "answer" in env else scenario("crane", **env)])
    agents.script({EVERY: [guess("crane")]})
    found = agents.train(wordle(agents, environment), code=2)
    for word in words:
        assert word in "\n".join(found.errors)


def test_the_example_is_right() -> None:
    from retrograd_env_wordle.plugin import _problems

    from retrograd.agent import load_scenarios

    for one in load_scenarios(PROJECT / "example" / "scenarios.jsonl"):
        assert list(_problems(one, [])) == []


def test_only_public_modules_are_imported() -> None:
    for path in (PROJECT / "retrograd_env_wordle").glob("*.py"):
        imports = [line for line in path.read_text().splitlines() if line.startswith("from retrograd")]
        assert all(line.split()[1] in ("retrograd.agent", "retrograd_hookspecs") for line in imports), imports
