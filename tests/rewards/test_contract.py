"""The contract suite itself: each promise that a reward can break is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from retrograd.testing.rewards import check_reward
from retrograd_hookspecs import Answer, Score

from .support import ANSWERS


class Length:
    """A reward that keeps its promises."""

    def __init__(self) -> None:
        self.closed = 0

    def score(self, answers: Sequence[Answer]) -> Sequence[Score]:
        return [Score(kind="value", value=float(len(answer.completion))) for answer in answers]

    def close(self) -> None:
        self.closed += 1


def changed(change: Callable[[list[Score], Sequence[Answer]], Any]) -> Callable[[], Any]:
    class Changed(Length):
        def score(self, answers: Sequence[Answer]) -> Any:
            return change(list(super().score(answers)), answers)

    return Changed


def test_a_good_reward_passes_and_is_closed_twice() -> None:
    made: list[Length] = []

    def make() -> Length:
        made.append(Length())
        return made[-1]

    check_reward(make, ANSWERS)
    assert [reward.closed for reward in made] == [2, 2]


def each(**changes: Any) -> Callable[[list[Score], Sequence[Answer]], list[Score]]:
    return lambda scores, answers: [attrs.evolve(score, **changes) for score in scores]


def mutate(scores: list[Score], answers: Sequence[Answer]) -> list[Score]:
    for answer in answers:
        answer.metadata["seen"] = True  # type: ignore[index]
    return scores


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda scores, answers: scores[:-1], "2 scores for 3 answers"),
        (
            lambda scores, answers: scores or [Score(kind="missing", explanation="x")],
            "1 scores for 0 answers",
        ),
        (lambda scores, answers: sorted(scores, key=lambda s: s.value), "not in the order of the answers"),
        (lambda scores, answers: [s.value for s in scores], "a score is a Score"),
        (each(value=1.0), "all answers have the same score"),
        (each(kind="good"), "unknown kind"),
        (each(value=math.nan), "a value is finite"),
        (each(value="1"), "a value is a number"),
        (each(kind="missing"), "says why"),
        (each(judge_weight=-1.0), "judge_weight is at least 0"),
        (each(judge_weight=math.inf), "judge_weight is finite"),
        (mutate, "changed the answers"),
        (
            lambda scores, answers: [attrs.evolve(s, value=s.value / len(scores)) for s in scores],
            "depends on the other answers of its batch",
        ),
        (
            lambda scores, answers: [attrs.evolve(s, value=s.value + (len(scores) == 1)) for s in scores],
            "depends on the size of its batch",
        ),
    ],
)
def test_a_broken_promise_is_found(change: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_reward(changed(change), ANSWERS)


def test_rewards_of_a_whole_batch_are_allowed_where_they_say_so() -> None:
    relative = changed(lambda scores, answers: [attrs.evolve(s, value=s.value / len(scores)) for s in scores])
    check_reward(relative, ANSWERS, batch_dependent=True)
    with pytest.raises(AssertionError, match="at least two answers"):
        check_reward(Length, ANSWERS[:1])


def test_awkward_texts_are_part_of_it() -> None:
    def fragile(scores: list[Score], answers: Sequence[Answer]) -> list[Score]:
        for answer in answers:
            answer.completion.encode()
        return scores

    with pytest.raises(UnicodeEncodeError):
        check_reward(changed(fragile), ANSWERS)
