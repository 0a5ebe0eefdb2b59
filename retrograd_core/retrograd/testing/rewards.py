"""Contract of a reward: `check_reward(make, answers)` raises `AssertionError` where it is broken."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import attrs

from retrograd_hookspecs import Answer, Message, Reward, Score

_AWKWARD = (
    "",
    " \t ",
    "one\ntwo\r\nthree\rfour\n",
    "null",
    '{"reward": 1}',
    'quotes " and \\ and \x00 \x1b[0m',
    "日本語 · زمین · 👩🏽‍🚀 · \u2028\u2029\x85 · \ufeff",
    "\ud83d",  # half a surrogate pair, which JSON can carry and UTF-8 cannot
    "long " * 30_000,
)
"""Texts that have broken rewards or the pipes to them."""


def check_reward(
    make: Callable[[], Reward], answers: Sequence[Answer], *, batch_dependent: bool = False
) -> None:
    """Check what every reward promises.

    One score per answer, in order, of a documented form; texts with newlines, quotes, control characters and
    other scripts are scored or refused with a reason, and change no other score; an empty batch has no
    scores; the input is left alone; `close` may come twice, also before the first batch.

    Args:
        make: a new reward.
        answers: at least two that are scored differently, or the order could not be checked.
        batch_dependent: the score of an answer may depend on the others of its batch.
    """
    unused = make()
    unused.close()
    unused.close()
    reward = make()
    try:
        _check_scores(reward, list(answers), batch_dependent)
    finally:
        reward.close()
        reward.close()


def _check_scores(reward: Reward, answers: list[Answer], batch_dependent: bool) -> None:
    assert len(answers) > 1, "the contract needs at least two answers"
    assert len(_scores(reward, [])) == 0, "an empty batch has no scores"
    scores = _scores(reward, answers)
    assert len({_comparable(score) for score in scores}) > 1, (
        "all answers have the same score: without answers that differ in it, order cannot be checked"
    )
    awkward = [
        Answer(prompt=text, completion=text, messages=(Message(role="user", content=text),))
        for text in _AWKWARD
    ]
    mixed = _scores(reward, [*awkward, *answers, *awkward])
    if batch_dependent:
        return
    assert _scores(reward, answers[::-1]) == scores[::-1], "the scores are not in the order of the answers"
    assert mixed[len(awkward) : -len(awkward)] == scores, "a score depends on the other answers of its batch"
    for answer, score in zip(answers, scores, strict=True):
        assert _scores(reward, [answer]) == [score], "a score depends on the size of its batch"


def _scores(reward: Reward, answers: list[Answer]) -> list[Score]:
    before = copy.deepcopy(answers)
    scores = list(reward.score(answers))
    assert answers == before, "score() changed the answers"
    assert len(scores) == len(answers), f"{len(scores)} scores for {len(answers)} answers"
    for score in scores:
        _check_score(score)
    return scores


def _check_score(score: Score) -> None:
    assert isinstance(score, Score), f"a score is a Score, not {score!r}"
    assert score.kind in ("value", "missing", "error"), f"unknown kind: {score}"
    if score.kind == "value":
        assert isinstance(score.value, float | int), f"a value is a number: {score}"
        assert math.isfinite(score.value), f"a value is finite: {score}"
    else:
        assert score.explanation, f"a score without a value says why: {score}"
    if score.judge_weight is not None:
        assert math.isfinite(score.judge_weight), f"judge_weight is finite: {score}"
        assert score.judge_weight >= 0, f"judge_weight is at least 0: {score}"


def _comparable(score: Score) -> tuple[object, ...]:
    return attrs.astuple(score)
