"""Contract of a judge: `check_judge(make)` raises `AssertionError` where it is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from retrograd_hookspecs import Judge, JudgeGroup, JudgeMember, Message, Score


def example_groups() -> list[JudgeGroup]:
    """Groups of two, three and seven members: equal ones, an empty answer, a rubric of its own."""
    opening = (Message(role="system", content="Be brief."), Message(role="user", content="What is 37 + 5?"))
    return [
        JudgeGroup(id="two", opening=opening, members=(_answer("42"), _answer("It is 41."))),
        JudgeGroup(
            id="three",
            opening=opening,
            members=(_answer("42"), _answer(""), _answer("42")),
            rubric="Only the number counts.",
        ),
        JudgeGroup(id="seven", opening=opening, members=tuple(_answer(f"{40 + i} é \n") for i in range(7))),
    ]


def _answer(text: str) -> JudgeMember:
    return JudgeMember(messages=(Message(role="assistant", content=text),), final_state=None)


async def check_judge(
    make: Callable[[], Judge],
    *,
    groups: Sequence[JudgeGroup] | None = None,
    broken: Callable[[], Judge] | None = None,
    by_content: bool = False,
) -> None:
    """Check what every judge promises. `make` gives one that can judge `groups`, `broken` one that cannot.

    One score a member; all are values in [0, 1] or all are errors with a reason; explanations are text,
    which may be empty; groups may be judged at once; an empty group has no scores; `close` may be called
    twice; a broken judge does not raise. `by_content` says that a member's score follows from what the
    members contain, not from their order: then scores must be in the order of the members.
    """
    import anyio

    groups = example_groups() if groups is None else groups
    judge = make()
    try:
        for group in groups:
            scores = check_scores(group, await judge.score(group))
            assert all(score.kind == "value" for score in scores), f"{group.id}: {scores[0].explanation}"
        at_once: dict[str, Sequence[Score]] = {}

        async def score(group: JudgeGroup) -> None:
            at_once[group.id] = await judge.score(group)

        async with anyio.create_task_group() as tasks:
            for group in groups:
                tasks.start_soon(score, group)
        for group in groups:
            check_scores(group, at_once[group.id])
        if by_content:
            for group in groups:
                await _check_order(judge, group)
        empty = JudgeGroup(id="empty", opening=groups[0].opening, members=())
        assert not list(await judge.score(empty)), "a group without members has scores"
    finally:
        await judge.close()
        await judge.close()
    if broken is not None:
        await _check_broken(broken(), groups)


async def _check_order(judge: Judge, group: JudgeGroup) -> None:
    scores = [score.value for score in await judge.score(group)]
    reversed_group = attrs.evolve(group, id=f"{group.id} reversed", members=group.members[::-1])
    back = [score.value for score in await judge.score(reversed_group)]
    kept = all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(back, scores[::-1], strict=True))
    assert kept, f"{group.id}: scores are not in the order of the members"


async def _check_broken(judge: Judge, groups: Sequence[JudgeGroup]) -> None:
    try:
        for group in groups:
            scores = check_scores(group, await judge.score(group))
            judged = any(score.kind == "value" for score in scores)
            assert not judged, f"{group.id}: a judge that cannot judge did"
    finally:
        await judge.close()
        await judge.close()


def check_scores(group: JudgeGroup, scores: Sequence[Score]) -> Sequence[Score]:
    """The scores, if they are what a judge may answer for the group."""
    assert len(scores) == len(group.members), f"{len(scores)} scores for {len(group.members)} members"
    kinds = {score.kind for score in scores}
    assert kinds in ({"value"}, {"error"}), f"{group.id}: a group is judged whole or not at all, got {kinds}"
    for index, score in enumerate(scores):
        where = f"{group.id}, member {index}"
        assert isinstance(score.explanation, str), f"{where}: the explanation is no text"
        assert score.judge_weight is None, f"{where}: judge_weight belongs to rewards"
        if score.kind == "value":
            assert math.isfinite(score.value), f"{where}: {score.value} is not finite"
            assert 0 <= score.value <= 1, f"{where}: {score.value} is outside 0 to 1"
        else:
            assert score.explanation, f"{where}: an error without a reason"
    return scores
