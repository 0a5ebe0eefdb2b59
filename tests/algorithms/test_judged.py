"""A judge in a run of GRPO, behind a real HTTP server and as a program."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest

from tests.judges.server import JudgeServer, hang, status
from tests.rewards.support import nothing_left

from .support import Rollouts, Watch, value_of, watched


def judged(server: JudgeServer, judge: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A `[grpo]` table with that server as the judge."""
    table = {"type": "ruler", "base_url": server.url, "model": "m", "max_retries": 0, **(judge or {})}
    return {"judge_weight": 0.5, "judge": table, **keys}


def assert_totals(watch: Watch, weight: float) -> None:
    """reward + weight · verdict, of every answer of a judged group."""
    seen = 0
    for group in (
        group for groups in watch.groups for group in groups if not group.dropped.startswith("judge")
    ):
        for rollout in group.members:
            if rollout.judgement is not None:
                own = rollout.reward.judge_weight
                verdict = (weight if own is None else own) * rollout.judgement.value
                assert rollout.total == pytest.approx(rollout.reward.value + verdict, abs=1e-12)
                seen += verdict > 0
    assert seen > 0


def test_verdicts_are_added_with_their_weight(rollouts: Rollouts, server: JudgeServer) -> None:
    watch = watched(rollouts.grpo(grpo=judged(server), evaluation={"data": "heldout.jsonl"}))
    assert_totals(watch, 0.5)
    for groups, report in zip(watch.groups, watch.reports, strict=True):
        verdicts = [r.judgement.value for g in groups for r in g.members if r.judgement is not None]
        assert len(verdicts) == 6
        assert report.metrics["judge/score_mean"] == pytest.approx(sum(verdicts) / 6)
        assert report.metrics["judge/failed_fraction"] == 0.0
        assert report.metrics["judge/requests"] == 2.0
        assert report.metrics["timing/judge_seconds"] > 0
    # Two groups in two updates, and none of the evaluations.
    assert len(server.requests) == 4
    assert sum("eval/reward" in record for record in rollouts.metrics()) == 3


def test_a_weight_of_an_answers_own(rollouts: Rollouts, server: JudgeServer) -> None:
    rollouts.python(
        "reward.py",
        """
        from retrograd_hookspecs import Score

        def score(prompt, completion):
            return Score(kind="value", value=1.0, judge_weight=len(completion) % 3 / 2)
        """,
    )
    watch = watched(rollouts.grpo(grpo=judged(server)))
    assert_totals(watch, 0.5)
    assert len({r.reward.judge_weight for g in watch.groups[0] for r in g.members}) > 1


def test_a_weight_of_zero_leaves_the_rewards(rollouts: Rollouts, server: JudgeServer) -> None:
    rollouts.train(rollouts.grpo())
    alone = rollouts.adapter
    rollouts.train(rollouts.grpo(grpo=judged(server, judge_weight=0.0)))
    assert rollouts.adapter == alone


def test_a_group_without_a_verdict_is_dropped(rollouts: Rollouts, server: JudgeServer) -> None:
    server.script.append(status(403, "the model is busy"))
    watch = watched(rollouts.grpo(grpo=judged(server, judge={"max_concurrency": 1})))
    [lost] = [group for group in watch.groups[0] if group.dropped]
    assert lost.dropped.startswith("judge failed: ")
    assert "the model is busy" in lost.dropped
    first, second = (report.metrics for report in watch.reports)
    assert (first["judge/failed_fraction"], first["batch/groups_trained"]) == (0.5, 1.0)
    assert (second["judge/failed_fraction"], second["batch/groups_trained"]) == (0.0, 2.0)
    assert all(rollout.advantage is None for rollout in lost.members)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"judge_failure": "fail"},
            ["prompts.jsonl:", 'judge_failure = "drop_group" would leave the group out', "is busy"],
        ),
        (
            {"max_judge_dropped_fraction": 0.4},
            ["the judge failed for 1 of 2 groups of update 1", "max_judge_dropped_fraction = 0.4", "is busy"],
        ),
    ],
)
def test_failures_that_end_the_run(
    rollouts: Rollouts, server: JudgeServer, keys: dict[str, Any], words: list[str]
) -> None:
    server.script.append(status(403, "the model is busy"))
    found = rollouts.train(rollouts.grpo(grpo=judged(server, **keys)), code=1)
    for word in words:
        assert word in "\n".join(found.errors)


def test_only_answers_with_a_reward_are_judged(rollouts: Rollouts, server: JudgeServer) -> None:
    """What is left out is not shown to the judge; a group of fewer than two is not judged at all."""
    rollouts.python(
        "reward.py",
        """
        import zlib

        def score(prompt, completion):
            if prompt == "say 0" and len(seen) or seen.append(1):
                return None
            return None if zlib.crc32(completion.encode()) % 3 == 0 else 1.0

        seen = []
        """,
    )
    watch = watched(rollouts.grpo(grpo=judged(server, group_size=6, updates=1)))
    none, some = watch.groups[0]
    assert none.dropped.startswith("fewer than two answers are left: reward missing")
    assert all(rollout.judgement is None for rollout in none.members)
    kept = [rollout for rollout in some.members if not rollout.excluded]
    assert 2 <= len(kept) < 6
    assert all((rollout.judgement is None) == bool(rollout.excluded) for rollout in some.members)
    [request] = server.requests
    assert len(request.candidates) == len({rollout.completion for rollout in kept})


def test_verdicts_are_kept_from_run_to_run(rollouts: Rollouts, server: JudgeServer) -> None:
    path = rollouts.grpo(grpo=judged(server, judge={"cache_path": "verdicts.jsonl"}))
    rollouts.train(path)
    adapter, asked = rollouts.adapter, len(server.requests)
    assert asked == 4
    server.always = status(500)
    rollouts.train(path)
    assert rollouts.adapter == adapter
    assert len(server.requests) == asked


def test_a_rubric_of_the_prompts_own(rollouts: Rollouts, server: JudgeServer) -> None:
    rollouts.prompts("prompts.jsonl", ["say 0"], rubric="Prefer answers about otters.")
    rollouts.train(rollouts.grpo(grpo=judged(server, prompts_per_update=1, updates=1)))
    [request] = server.requests
    assert "otters" in json.dumps(request.body)
    assert "1 prompts carry a rubric, and no judge reads it" in rollouts.train(rollouts.grpo()).err


PROGRAM = """
import json, sys, zlib

for line in sys.stdin:
    group = json.loads(line)
    texts = [member["messages"][0]["content"] for member in group["members"]]
    scores = [
        {"id": i, "score": zlib.crc32(text.encode("utf-8", "surrogateescape")) % 11 / 10, "explanation": ""}
        for i, text in enumerate(texts)
    ]
    print(json.dumps({"group": group["group"], "scores": scores}), flush=True)
"""


def test_a_program_as_the_judge(rollouts: Rollouts) -> None:
    rollouts.python("judge.py", PROGRAM)
    judge = {"type": "command", "command": [sys.executable, "judge.py"]}
    with nothing_left(rollouts.directory):
        watch = watched(rollouts.grpo(grpo={"judge_weight": 0.5, "judge": judge}))
    assert_totals(watch, 0.5)
    for rollout in (rollout for group in watch.groups[0] for rollout in group.members):
        assert rollout.judgement is not None
        assert rollout.judgement.value == value_of(rollout.completion)
    rollouts.python("judge.py", "import sys\nsys.stdin.readline()\nsys.exit('out of ink')\n")
    with nothing_left(rollouts.directory):
        found = rollouts.train(rollouts.grpo(grpo={"judge_weight": 0.5, "judge": judge}), code=1)
    assert "the judge failed for 2 of 2 groups of update 1" in "\n".join(found.errors)
    assert "out of ink" in "\n".join(found.errors)


@pytest.mark.parametrize("program", [False, True])
def test_ctrl_c_while_a_verdict_is_awaited(rollouts: Rollouts, server: JudgeServer, program: bool) -> None:
    """The update is given up at once, and the run can be resumed."""
    rollouts.python("judge.py", "import sys, time\nopen('asked', 'w')\ntime.sleep(600)\n")
    keys = judged(server, judge={"timeout_secs": 60.0})
    if program:
        judge = {"type": "command", "command": [sys.executable, "judge.py"], "timeout_secs": 60.0}
        keys = {"judge_weight": 0.5, "judge": judge}
    path = rollouts.grpo(grpo=keys)
    server.always = hang

    def signals() -> None:
        while not server.requests and not (rollouts / "asked").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=signals)
    thread.start()
    started = time.monotonic()
    with nothing_left(rollouts.directory):
        found = rollouts.train(path, code=1)
    thread.join()
    assert time.monotonic() - started < 30
    assert "interrupted after 0 steps" in found.out


def test_a_judge_that_raises_is_named(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch, server: Any
) -> None:
    """One error, not a group of them; and a wrong number of scores is an error."""
    from retrograd_hookspecs import RolloutError, Score
    from retrograd_plugins.judges._ruler import Ruler

    async def broken(self: Any, group: Any) -> list[Score]:
        raise RolloutError("the budget of the judge is spent")

    async def short(self: Any, group: Any) -> list[Score]:
        return [Score(kind="value", value=1.0)]

    monkeypatch.setattr(Ruler, "score", broken)
    path = rollouts.grpo(grpo=judged(server))
    assert rollouts.train(path, code=1).errors[0] == "error: the budget of the judge is spent"
    monkeypatch.setattr(Ruler, "score", short)
    assert rollouts.train(path, code=1).errors[0] == "error: the judge gave 1 scores for 3 answers"
