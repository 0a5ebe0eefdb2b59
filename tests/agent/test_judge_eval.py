"""`retrograd judge eval` on trajectories, with the judge of an agentic run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import retrograd, write_jsonl
from tests.judges.server import JudgeServer

from .support import SMALL, Agents, right, sum_scenario, wrong
from .test_collect import collect, lines


@pytest.fixture
def agents(tmp_path: Path, tiny_model: Callable[..., Path]) -> Agents:
    return Agents(tmp_path, tiny_model(**SMALL))


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    served = JudgeServer()
    yield served
    served.close()


def called(text: str, result: str, answer: str, **ids: str) -> list[dict[str, Any]]:
    """A trajectory of two turns."""
    return [
        {
            "role": "assistant",
            "content": text,
            "tool_calls": [{**ids, "function": {"name": "look", "arguments": {"at": "all"}}}],
        },
        {"role": "tool", "content": result, **({"tool_call_id": ids["id"]} if ids else {})},
        {"role": "assistant", "content": answer},
    ]


def evaluated(agents: Agents, judge: dict[str, Any], *groups: dict[str, Any]) -> dict[str, Any]:
    """Figures of the judge on fixtures; there is no model."""
    fixtures = write_jsonl(agents / "fixtures.jsonl", groups)
    path = agents.agent(model={"path": "is-not-there.gguf"}, agent={"judge": judge})
    outcome = retrograd("judge", "eval", path, "--fixtures", fixtures, "--json")
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def test_trajectories_before_a_model(agents: Agents, server: JudgeServer) -> None:
    group = {
        "id": "look",
        "opening": [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "Look."}],
        "rubric": "Looking counts.",
        "members": [
            {"messages": called("First,", "a b", "worth 0.3", id="x"), "final_state": "seen", "label": 1},
            {"messages": called("", "c", "worth 0.8"), "label": 2},
            {"final_state": "worth 0.1", "label": 0},
        ],
    }
    found = evaluated(agents, {"type": "ruler", "base_url": server.url, "model": "m"}, group)
    assert found["overall"]["kendall_tau"] == found["overall"]["spearman_rho"] == 1.0
    assert found["overall"]["self_kendall_tau"] == 1.0
    first, second = server.requests
    assert "[system]\nUse tools." in first.user
    assert "Looking counts." in first.system
    texts = sorted(first.candidates.values())
    assert texts == sorted(second.candidates.values())
    assert '[assistant]\nFirst,\ncalls look {"at": "all"}\n\n[tool look]\na b\n\n' in "".join(texts)
    assert "worth 0.3\n\n[final state]\nseen" in "".join(texts)
    assert "[tool look]\nc\n" in "".join(texts)
    assert "[final state]\nworth 0.1" in texts


PROGRAM = """
import json, sys

for line in sys.stdin:
    group = json.loads(line)
    print(json.dumps({"group": group["group"], "scores": [
        {"id": m["id"], "score": 0.9 if '"answer": "1"' in json.dumps(m).replace(chr(92), "") else 0.2}
        for m in group["members"]
    ]}), flush=True)
"""


@pytest.mark.parametrize("raw", [False, True], ids=["structured", "raw"])
def test_collected_traces_as_fixtures(agents: Agents, raw: bool) -> None:
    """What `collect` writes can be labelled as it is."""
    agents.scenarios([sum_scenario(0)])
    agents.script({0: right(0), 1: wrong(0)})
    collect(agents, "--k", 2, "--keep", 2, "--allow-unverified", *(["--raw"] if raw else []))
    traces = [record["messages"] for record in lines(agents)]
    group = {
        "id": "sum-0",
        "opening": traces[0][:1],
        "members": [{"messages": trace[1:], "label": 1 - n} for n, trace in enumerate(traces)],
    }
    (agents / "judge.py").write_text(PROGRAM)
    judge = {"type": "command", "command": [sys.executable, str(agents / "judge.py")]}
    found = evaluated(agents, judge, group)
    assert found["overall"]["kendall_tau"] == 1.0
    assert found["overall"]["failed"] == 0
