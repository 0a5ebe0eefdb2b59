"""The scripted sampler: a real agentic run writes what the script says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from retrograd_hookspecs import RolloutError
from tests.algorithms.support import watched

from .support import EVERY, SMALL, Agents, call, right, wrong


@pytest.fixture
def agents(tmp_path: Path, tiny_model: Callable[..., Path]) -> Agents:
    return Agents(tmp_path, tiny_model(**SMALL))


def test_a_run_plays_the_script(agents: Agents) -> None:
    agents.script({0: right(0), 1: wrong(0), 2: ["I do not know."], EVERY: [call("crash")]})
    path = agents.agent(agent={"max_dropped_fraction": 1.0})
    watch = watched(path)
    [groups] = watch.groups
    first, second = groups
    assert [r.reward.value for r in first.members if r.reward.kind == "value"] == [1.0, 0.0, 0.0]
    assert first.members[0].final_state == "answer: 1"
    assert first.members[0].messages[0].content == right(0)[0]
    assert first.members[0].messages[1].content == "1"
    assert first.members[2].completion == "I do not know."
    assert {r.excluded for r in second.members} == {"failed: the world broke"}


def test_a_turn_without_a_script_is_said(agents: Agents) -> None:
    agents.script({EVERY: [call("add", a=1, b=2)]})
    with pytest.raises(RolloutError, match="has no script for turn 1"):
        watched(agents.agent())
