"""Rewards that are Python functions: how they are found, what they receive, what their results become."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.testing.rewards import check_reward
from retrograd_hookspecs import Answer, BuildContext, Message, PluginError, Reward, Score
from retrograd_plugins.rewards.python import PythonReward, retrograd_rewards

from .support import ANSWERS

FULL = Answer(
    prompt="p",
    completion="c",
    messages=(Message(role="system", content="s"), Message(role="user", content="p")),
    finish="length",
    metadata={"answer": [1, 2]},
)


def build(directory: Path, function: str) -> Reward:
    [component] = retrograd_rewards()
    return component.build(component.config(function=function), BuildContext(config=None, base_dir=directory))


def written(directory: Path, text: str, function: str = "reward", name: str | None = None) -> Reward:
    """A reward of a function in a module of its own."""
    name = name or f"rewards_{abs(hash((str(directory), text)))}"
    (directory / f"{name}.py").write_text(text, encoding="utf-8")
    return build(directory, f"{name}:{function}")


def refusal(directory: Path, function: str) -> str:
    with pytest.raises(PluginError) as caught:
        build(directory, function)
    text = str(caught.value)
    assert repr(function) in text
    return text


def returned(value: Any) -> Score:
    [score] = PythonReward(lambda prompt, completion: value, Path(), "test").score(ANSWERS[:1])
    return score


def test_contract(tmp_path: Path) -> None:
    check_reward(lambda: written(tmp_path, "def reward(prompt, completion): return len(completion)"), ANSWERS)


def test_contract_with_every_kind_of_score(tmp_path: Path) -> None:
    text = (
        "def reward(prompt, completion):\n"
        "    if '2' in prompt: return None\n"
        "    return 1 / completion.count('a')\n"
    )
    reward = written(tmp_path, text)
    check_reward(lambda: reward, ANSWERS)
    assert [score.kind for score in reward.score(ANSWERS)] == ["missing", "value", "error"]


def test_by_path_and_by_name(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "by_path.py").write_text("import beside\ndef one(p, c): return beside.VALUE")
    (tmp_path / "beside.py").write_text("VALUE = 3\ndef two(p, c):\n    import later\n    return later.VALUE")
    (tmp_path / "later.py").write_text("VALUE = 4")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner.py").write_text("def three(p, c): return 5")
    before = list(sys.path)
    for function, value in (
        ("./lib/by_path.py:one", 3.0),
        (f"{tmp_path}/lib/by_path.py:one", 3.0),
        ("beside:two", 4.0),
        ("beside.py:two", 4.0),
        ("package.inner:three", 5.0),
    ):
        assert build(tmp_path, function).score(ANSWERS[:1]) == [Score(kind="value", value=value)]
        assert sys.path == before


def test_the_same_name_in_two_directories(tmp_path: Path) -> None:
    """By path each has its own; by name Python would give the second run the first one's module."""
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "same_name.py").write_text(f"def reward(p, c): return {number}")
    for number in (1, 2):
        [score] = build(tmp_path / str(number), "./same_name.py:reward").score(ANSWERS[:1])
        assert score.value == number
    build(tmp_path / "1", "same_name:reward")
    text = refusal(tmp_path / "2", "same_name:reward")
    assert (
        f"{tmp_path / '2' / 'same_name.py'} is hidden by the module 'same_name' of {tmp_path / '1'}" in text
    )
    assert 'write "./same_name.py:…"' in text
    (tmp_path / "json.py").write_text("def reward(p, c): return 1")
    assert "is hidden by the module 'json' of" in refusal(tmp_path, "json:reward")


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("prompt, completion", {}),
        ("a, b, *, metadata", {"metadata": {"answer": [1, 2]}}),
        ("prompt, completion, messages, finish='stop'", {"messages": FULL.messages, "finish": "length"}),
        ("prompt, completion, /, other=1, finish=None", {"other": 1, "finish": "length"}),
        ("p, c, **rest", {"messages": FULL.messages, "finish": "length", "metadata": {"answer": [1, 2]}}),
        ("*all", {}),
    ],
)  # fmt: skip
def test_what_a_function_receives(tmp_path: Path, signature: str, expected: dict[str, Any]) -> None:
    text = f"seen = []\ndef reward({signature}):\n    seen.append(dict(locals()))\n    return 1\n"
    reward = written(tmp_path, text, name=f"receives_{abs(hash(signature))}")
    assert reward.score([FULL]) == [Score(kind="value", value=1.0)]
    [seen] = sys.modules[f"receives_{abs(hash(signature))}"].seen
    seen |= seen.pop("rest", {})
    if "all" in seen:
        assert seen == {"all": ("p", "c")}
    else:
        assert dict(list(seen.items())[2:]) == expected
        assert list(seen.values())[:2] == ["p", "c"]


def test_a_function_cannot_change_the_data(tmp_path: Path) -> None:
    text = "def reward(p, c, metadata):\n    metadata['answer'].append(3); return len(metadata['answer'])\n"
    assert [score.value for score in written(tmp_path, text).score([FULL, FULL])] == [3, 3]
    assert FULL.metadata == {"answer": [1, 2]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.True_, 1.0),
        (np.array(2.5), 2.5),
    ],
)
def test_numbers(value: Any, expected: float) -> None:
    assert returned(value) == Score(kind="value", value=expected)
    assert type(returned(value).value) is float


def test_scores_pass_through() -> None:
    for score in (
        Score(kind="value", value=2.0, judge_weight=0.5, explanation="good"),
        Score(kind="missing", explanation="no"),
        Score(kind="error", explanation="broken"),
    ):
        assert returned(score) == score
    assert returned(None) == Score(kind="missing", explanation="the reward function returned None")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "returned nan, not a finite number"),
        (float("-inf"), "returned -inf, not a finite number"),
        (10**400, "not a finite number (int too large"),
        ("1.0", "returned '1.0' (of type str), not a number"),
        ([1.0], "returned [1.0] (of type list), not a number: it is called once an answer"),
        ({"reward": 1}, "returned {'reward': 1} (of type dict), not a number"),
        (np.str_("0.5"), "(of type str_), not a number"),
        (np.array("0.5"), "(of type ndarray), not a number"),
        (np.complex128(1 + 2j), "(of type complex128), not a number"),
        (np.datetime64("2020-01-01"), "not a number"),
        (1j, "returned 1j (of type complex), not a number"),
        (np.array([1.0, 2.0]), "(of type ndarray), not a finite number"),
        ("x" * 500, "x… (of type str)"),
        (Score(kind="value", value=float("inf")), "a Score with the value inf"),
        (Score(kind="value", value=1, judge_weight=-1), "a Score with the judge_weight -1"),
        (Score(kind="value", value=1, judge_weight=float("nan")), "a Score with the judge_weight nan"),
        (Score(kind="good"), "a Score of the unknown kind 'good'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_reward(value: Any, words: str) -> None:
    score = returned(value)
    assert (score.kind, score.value) == ("error", 0.0)
    assert words in score.explanation
    assert score.explanation.startswith("the reward function returned")


def test_an_exception_is_an_error_with_its_place(tmp_path: Path) -> None:
    text = "import json\n\ndef reward(p, c):\n    if c == '4':\n        return 1\n    return json.loads(c)\n"
    reward = written(tmp_path, text, name="raises_here")
    good, bad, other = reward.score(ANSWERS)
    assert good == Score(kind="value", value=1.0)
    assert bad.kind == other.kind == "error"
    assert bad.explanation == (
        f"JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({tmp_path / 'raises_here.py'}:6)"
    )


def test_exit_does_not_end_the_run(tmp_path: Path) -> None:
    [score] = written(tmp_path, "def reward(p, c): exit('done')").score(ANSWERS[:1])
    assert score.kind == "error"
    assert score.explanation.startswith("SystemExit: done (")


def test_ctrl_c_does(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path, "def reward(p, c): raise KeyboardInterrupt").score(ANSWERS)


def test_functions_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "shelf.py").write_text(
        "NUMBER = 3\n"
        "def length(prompt, completion): return 1\n"
        "def swapped(completion, prompt): return 1\n"
        "def needs_more(prompt, completion, budget): return 1\n"
        "def takes_one(prompt): return 1\n"
        "async def later(prompt, completion): return 1\n"
        "class Length:\n    def __init__(self, prompt, completion): pass\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "needs.py").write_text("import no_such_thing\n")
    for name in ("length", ":length", "shelf:", "shelf:a b", "shelf:Length.score"):
        assert 'write "module:function" or "./file.py:function"' in refusal(tmp_path, name)
    assert f"{tmp_path / 'shelf.py'} has no 'lenght' (did you mean length?)" in refusal(
        tmp_path, "shelf:lenght"
    )
    listing = "(there are: later, length, needs_more, swapped, takes_one)"
    assert f"has no 'score' {listing}" in refusal(tmp_path, "shelf:score")
    assert "'NUMBER' in " in (text := refusal(tmp_path, "shelf:NUMBER"))
    assert "is not a function but of type int" in text
    assert "is a class: it must be a plain function" in refusal(tmp_path, "shelf:Length")
    assert "is asynchronous: it must be a plain function" in refusal(tmp_path, "shelf:later")
    assert "takes (completion, prompt): the prompt is the first" in refusal(tmp_path, "shelf:swapped")
    assert "missing a required argument: 'budget'" in refusal(tmp_path, "shelf:needs_more")
    assert "too many positional arguments" in refusal(tmp_path, "shelf:takes_one")
    assert f"no module 'shlef', neither in {tmp_path} nor installed (did you mean shelf?)" in refusal(
        tmp_path, "shlef:length"
    )
    assert f"there is no file {tmp_path / 'shlef.py'} (did you mean shelf.py?)" in refusal(
        tmp_path, "./shlef.py:length"
    )
    place = f"{tmp_path / 'broken.py'}:2"
    for name in ("broken:f", "./broken.py:f"):
        assert f"failed: ZeroDivisionError: division by zero ({place})" in refusal(tmp_path, name)
    for name in ("syntax:f", "./syntax.py:f"):
        assert f"SyntaxError: invalid syntax ({tmp_path / 'syntax.py'}:1)" in refusal(tmp_path, name)
    assert "importing 'needs' failed: ModuleNotFoundError: No module named 'no_such_thing'" in refusal(
        tmp_path, "needs:f"
    )


def test_what_a_reward_prints_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output may be the JSON of a command."""
    text = "print('imported')\ndef reward(prompt, completion):\n    print('asked')\n    return 1.0\n"
    reward = written(tmp_path, text)
    assert reward.score(ANSWERS[:1]) == [Score(kind="value", value=1.0)]
    sys.stdout.write("after\n")
    captured = capsys.readouterr()
    assert captured.out == "after\n"
    assert captured.err == "imported\nasked\n"
