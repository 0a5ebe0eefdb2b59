"""A judge before a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import pytest

from retrograd_hookspecs import JudgeGroup, JudgeMember, Message, Score
from retrograd_plugins.judges._ruler import Ruler
from retrograd_plugins.judges.ruler import RulerJudge

from .server import JudgeServer

MakeJudge = Callable[..., Ruler]


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    served = JudgeServer()
    yield served
    served.close()


@pytest.fixture
def make(server: JudgeServer) -> MakeJudge:
    """`make(temperature=0.0, …)`: a judge of the server that does not wait long before a retry."""

    def judge(*, key: str = "", **config: Any) -> Ruler:
        values = {"base_url": server.url, "model": "m"} | config
        return Ruler(RulerJudge(**values), key, first_wait_secs=0.001)

    return judge


def answers(*texts: str) -> tuple[JudgeMember, ...]:
    return tuple(JudgeMember(messages=(Message(role="assistant", content=text),)) for text in texts)


def group_of(*texts: str, name: str = "g", rubric: str = "") -> JudgeGroup:
    opening = (Message(role="system", content="Be brief."), Message(role="user", content="37 + 5?"))
    return JudgeGroup(id=name, opening=opening, members=answers(*texts), rubric=rubric)


def worths(*values: float) -> JudgeGroup:
    """A group whose members are worth what is given."""
    return group_of(*(f"answer {i} is worth {value}" for i, value in enumerate(values)))


def judged(judge: Ruler, *groups: JudgeGroup) -> list[Sequence[Score]]:
    """Scores of groups judged at once; the judge is closed."""

    async def run() -> list[Sequence[Score]]:
        found: dict[int, Sequence[Score]] = {}

        async def one(index: int) -> None:
            found[index] = await judge.score(groups[index])

        async with anyio.create_task_group() as tasks:
            for index in range(len(groups)):
                tasks.start_soon(one, index)
        await judge.close()
        return [found[index] for index in range(len(groups))]

    return anyio.run(run)


def values(judge: Ruler, group: JudgeGroup) -> list[float]:
    """Values of one group; fails with the reason if there are none."""
    [scores] = judged(judge, group)
    for score in scores:
        assert score.kind == "value", score.explanation
    return [score.value for score in scores]


def reason(judge: Ruler, group: JudgeGroup) -> str:
    """Why a group has no verdict."""
    [scores] = judged(judge, group)
    assert {score.kind for score in scores} == {"error"}
    assert len(scores) == len(group.members)
    assert len({score.explanation for score in scores}) == 1
    return scores[0].explanation
