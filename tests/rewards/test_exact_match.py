"""`exact_match` of retrograd-extras, as a third party's reward: found, checked, scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrograd.plugins import Catalogue, PluginSession
from retrograd.testing.rewards import check_reward
from retrograd_hookspecs import Answer, BuildContext, Reward, Score

ANSWERS = [
    Answer(prompt="2 + 2?", completion="4", metadata={"answer": 4}),
    Answer(prompt="2 + 3?", completion="4", metadata={"answer": 5}),
]


def make(**keys: Any) -> Reward:
    component = PluginSession(Catalogue.installed()).component("rewards", "exact_match").component
    reward: Reward = component.build(component.config(**keys), BuildContext(config=None, base_dir=Path()))
    return reward


def one(completion: str, expected: Any, **keys: Any) -> Score:
    [score] = make(**keys).score([Answer(prompt="", completion=completion, metadata={"answer": expected})])
    return score


def test_contract(extras: None) -> None:
    check_reward(make, ANSWERS)


@pytest.mark.parametrize(
    ("completion", "expected", "value"),
    [
        ("4", 4, 1.0),
        (" 4\n", "4 ", 1.0),
        ("44", 4, 0.0),
        ("", "4", 0.0),
        ("0.5", 0.5, 1.0),
        ("grün", "grün", 1.0),
        ("Grün", "grün", 0.0),
        ("b", ["a", "b"], 1.0),
        ("c", ["a", "b"], 0.0),
    ],
)
def test_values(extras: None, completion: str, expected: Any, value: float) -> None:
    assert one(completion, expected) == Score(kind="value", value=value)


def test_keys(extras: None) -> None:
    assert one("GRÜN", "grün", ignore_case=True).value == 1.0
    reward = make(field="solution")
    [found] = reward.score([Answer(prompt="", completion="x", metadata={"solution": "x", "answer": "y"})])
    assert found.value == 1.0


def test_what_cannot_be_compared_is_not_wrong(extras: None) -> None:
    [missing] = make().score([Answer(prompt="", completion="x", metadata={"solution": "x"})])
    assert missing == Score(kind="missing", explanation="the record has no field 'answer'")
    for expected in (None, {"a": 1}, True, [["x"]]):
        score = one("x", expected)
        assert score.kind == "error"
        assert "must be a text, a number, or a list" in score.explanation
    assert one("x", []).kind == "error"
