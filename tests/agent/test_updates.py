"""Agentic runs from the file to the adapter: what is trained, counted, refused and said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from retrograd_hookspecs import RolloutError
from tests.algorithms.support import watched
from tests.e2e.support import retrograd
from tests.judges.server import JudgeServer, status

from .support import EVERY, Agents, call, right, sum_scenario, wrong

END = call("submit", answer="?")
LOOP = [call("add", a=1, b=1)] * 4
LIMITS: dict[str, Any] = {"scenarios_per_update": 1, "max_turns": 4, "max_dropped_fraction": 1.0}


def judge(server: JudgeServer, **keys: Any) -> dict[str, Any]:
    """A `[agent.judge]` with that server."""
    return {"type": "ruler", "base_url": server.url, "model": "m", "max_retries": 0, **keys}


def ungraded(**env: Any) -> list[dict[str, Any]]:
    return [sum_scenario(number, grade="none", **env) for number in range(2)]


def loss_by_hand(groups: Any, divisor: int) -> float:
    """−1/(N·L) Σ A, where every ratio is 1."""
    trained = [r for g in groups if not g.dropped for r in g.members if not r.excluded]
    return -sum(float(r.advantage[r.trained].sum()) for r in trained) / (len(trained) * divisor)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_loss_of_an_update(agents: Agents, level: str) -> None:
    """With step rewards, and with more than one optimizer pass."""
    agents.scenarios([sum_scenario(0, grade="step"), sum_scenario(1, partial=0.25)])
    agents.script({0: right(0), 1: wrong(0), 4: right(1), EVERY: [END]})
    agent = {"importance_sampling_level": level, "epochs_per_update": 2}
    watch = watched(agents.agent(agent=agent))
    [groups] = watch.groups
    first, second = watch.reports
    assert first.metrics["train/loss"] == pytest.approx(loss_by_hand(groups, 4 * 160), abs=1e-7)
    assert second.metrics["train/loss"] != first.metrics["train/loss"]
    assert [r.total for r in groups[0].members] == [1.0, 0.0, 0.0, 0.0]
    assert [r.total for r in groups[1].members] == [1.0, 0.25, 0.25, 0.25]
    # The reward came with the step, behind all that trajectory 0 wrote: nothing of it is told apart.
    assert len(set(groups[0].members[0].advantage[groups[0].members[0].trained])) == 1
    assert first.metrics["agent/turns_mean"] == pytest.approx((2 + 2 + 6) / 8)
    assert first.metrics["batch/answers_trained"] == 8.0


def test_the_budget_divides_the_loss(agents: Agents) -> None:
    agents.script({0: right(0), EVERY: [END]})
    losses = []
    for keys in (
        {"max_turns": 4},
        {"max_turns": 8},
        {"max_turns": 8, "max_trajectory_tokens": 1100},
    ):
        watch = watched(agents.agent(agent={"scenarios_per_update": 1, **keys}))
        limit = int(keys.get("max_trajectory_tokens", 1536))
        assert watch.reports[0].metrics["train/loss"] == pytest.approx(
            loss_by_hand(watch.groups[0], min(keys["max_turns"] * 160, limit)), abs=1e-7
        )
        losses.append(watch.reports[0].metrics["train/loss"])
    assert losses[0] == pytest.approx(2 * losses[1], rel=1e-6)


@pytest.mark.parametrize("truncation", ["drop", "min_reward"])
def test_truncated_trajectories(agents: Agents, truncation: str, capsys: Any) -> None:
    agents.script({0: right(0), 1: LOOP, 2: wrong(0), 3: LOOP})
    agent = {**LIMITS, "truncation": truncation, "max_dropped_fraction": 0.5}
    found = agents.train(agents.agent(agent=agent))
    [record] = agents.updates()
    kept = truncation == "min_reward"
    assert record["batch/answers_trained"] == (4 if kept else 2)
    assert record["agent/truncated_fraction"] == 0.5
    assert record["agent/dropped_fraction"] == (0.0 if kept else 0.5)
    said = "" if kept else " (2 by max_turns)"
    assert f"50% of the trajectories were cut{said}; raise the limits" in found.out + found.err
    assert "max_new_tokens" not in found.err + found.out


def test_too_many_lost(agents: Agents) -> None:
    agents.script({0: right(0), 1: LOOP, 2: wrong(0), 3: [call("crash")]})
    found = agents.train(agents.agent(agent={**LIMITS, "max_dropped_fraction": 0.4}), code=1)
    assert found.errors[0].startswith(
        "error: update 1 lost 50% of its 4 trajectories, more than max_dropped_fraction = 0.4: 1 truncated, 1"
        " failed, 0 without a reward; first: truncated: max_turns"
    )


def test_an_empty_update_fails_or_is_skipped(agents: Agents) -> None:
    agents.script({0: right(0), EVERY: LOOP, 4: right(1), 5: wrong(1), 6: wrong(1), 7: wrong(1)})
    found = agents.train(agents.agent(agent={**LIMITS, "updates": 2}), code=1)
    assert found.errors[0].startswith(
        "error: update 1 has 0 usable trajectories, and two are needed: fewer than two trajectories are left:"
        " truncated: max_turns; skip_empty_updates = true"
    )
    agents.train(agents.agent(agent={**LIMITS, "updates": 2, "skip_empty_updates": True}))
    records = agents.updates()
    assert [r["train/update"] for r in records] == [1.0, 2.0]
    assert [r["batch/groups_trained"] for r in records] == [0.0, 1.0]
    assert ["train/loss" in r for r in records] == [False, True]


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_equal_rewards_teach_nothing(agents: Agents, kl: float) -> None:
    """They do not end a run, if a later update has others."""
    agents.script({EVERY: [END]})
    found = agents.train(agents.agent(agent={"updates": 2, "kl_coefficient": kl}), code=1)
    assert found.errors[0] == "error: the run took no optimizer step: update 2: all rewards are equal"
    assert [r["batch/groups_trained"] for r in agents.updates()] == [0.0, 0.0]
    agents.scenarios([sum_scenario(0), sum_scenario(1), sum_scenario(2), sum_scenario(3)])
    agents.script({EVERY: [END], 8: right(2)})
    agents.train(agents.agent(agent={"updates": 2, "kl_coefficient": kl}))
    assert [r["batch/groups_trained"] for r in agents.updates()] == [0.0, 1.0]


def test_a_group_without_signal_is_not_in_the_denominator(agents: Agents) -> None:
    agents.script({0: right(0), EVERY: [END]})
    both = watched(agents.agent()).reports[0].metrics
    alone = watched(agents.agent(agent={"scenarios_per_update": 1})).reports[0].metrics
    assert both["train/loss"] == alone["train/loss"]
    assert (both["batch/groups"], both["batch/groups_trained"]) == (2.0, 1.0)


def test_a_world_that_cannot_start_drops_its_group(agents: Agents) -> None:
    agents.scenarios([sum_scenario(0, fail_setup="no disk"), sum_scenario(1)])
    agents.script({4: right(1), EVERY: [END]})
    watch = watched(agents.agent(agent={"max_dropped_fraction": 0.5}))
    assert watch.groups[0][0].dropped == "setup failed: no disk"
    assert watch.reports[0].metrics["batch/groups_trained"] == 1.0
    found = retrograd("check", agents.agent(), code=2)
    assert "setup failed: no disk" in found.err + found.out


def test_the_judge_compares_what_no_environment_grades(agents: Agents, server: JudgeServer) -> None:
    """One group is graded, with equal rewards of 0.0: it never reaches the judge."""
    agents.scenarios([sum_scenario(0, rubric="Be brief."), *ungraded()[1:]])
    agents.script(
        {EVERY: [END], 4: ["worth 0.9"], 5: ["worth 0.1"], 6: [call("add", a=1, b=2), "worth 0.5"], 7: LOOP}
    )
    watch = watched(agents.agent(agent={"judge": judge(server)}))
    first, second = watch.groups[0]
    assert (first.dropped, second.dropped) == ("all rewards are equal", "")
    assert [r.total for r in second.members] == [0.9, 0.1, 0.5, None]
    [request] = server.requests
    assert len(request.candidates) == 3
    assert "answer: ?" not in request.user
    metrics = watch.reports[0].metrics
    assert metrics["judge/score_mean"] == pytest.approx(0.5)
    assert metrics["agent/unscored_fraction"] == 0.0
    assert metrics["agent/dropped_fraction"] == 1 / 8


def test_the_judge_sees_a_summary_instead_of_the_transcript(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios(ungraded(summary=["git", "diff"]))
    turns = {n: [call("submit", answer=f"worth 0.{n}")] for n in range(4)}
    agents.script(turns)
    watch = watched(agents.agent(agent={**LIMITS, "judge": judge(server)}))
    assert [r.total for r in watch.groups[0][0].members] == [0.0, 0.1, 0.2, 0.3]
    [request] = server.requests
    for text in request.candidates.values():
        assert "answer: worth 0." in text
        assert "tool_call" not in text


def test_judged_trajectories_are_not_said_to_have_no_reward(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios(ungraded())
    agents.script({n: [f"worth 0.{n}"] for n in range(4)})
    found = agents.train(agents.agent(agent={**LIMITS, "judge": judge(server)}))
    assert "no reward" not in found.out + found.err
    agents.script({0: right(0), EVERY: [END]})
    agents.scenarios([sum_scenario(0, grade="error")])
    found = agents.train(agents.agent(agent={**LIMITS, "skip_empty_updates": True}), code=1)
    assert "4 of 4 trajectories have no reward and are left out; first: 1.0.0: unscored: error" in (
        found.out + found.err
    )


def test_a_verdict_that_fails(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios(ungraded())
    agents.script({n: [f"worth 0.{n}"] for n in range(8)})
    server.script.append(status(403, "the model is busy"))
    table = judge(server, max_concurrency=1)
    watch = watched(agents.agent(agent={"judge": table}))
    [lost] = [group for group in watch.groups[0] if group.dropped]
    assert "the model is busy" in lost.dropped
    assert all(r.total is None for r in lost.members)
    assert watch.reports[0].metrics["agent/dropped_fraction"] == 0.5
    server.script.append(status(403, "the model is busy"))
    found = agents.train(agents.agent(agent={"judge": table, "judge_failure": "fail"}), code=1)
    assert "the model is busy" in found.errors[0]
    assert 'judge_failure = "drop_group" would leave the group out' in found.errors[0]


@pytest.mark.parametrize("drop", [True, False])
def test_groups_that_the_judge_scored_identically(agents: Agents, server: JudgeServer, drop: bool) -> None:
    agents.scenarios(ungraded())
    agents.script({EVERY: ["worth 0.5"], 0: ["worth 0.9"]})
    agent = {"judge": judge(server), "drop_degenerate_groups": drop}
    watch = watched(agents.agent(agent=agent))
    metrics = watch.reports[0].metrics
    assert metrics["judge/degenerate_group_fraction"] == 0.5
    assert metrics["batch/answers_trained"] == (4.0 if drop else 8.0)


def test_evaluation_and_checkpoints(agents: Agents) -> None:
    agents.scenarios([sum_scenario(7), sum_scenario(8)], "heldout.jsonl")
    held_out = 1 << 40
    script = {0: right(0), held_out: right(7), held_out + 1: LOOP, EVERY: [END]}
    agents.script(script)
    path = agents.agent(
        evaluation={"data": "heldout.jsonl"},
        checkpoint={"directory": "checkpoints", "mode": "best_eval"},
        agent={"scenarios_per_update": 1},
    )
    agents.train(path)
    evaluations = [r for r in agents.metrics() if "eval/reward" in r]
    # The one that was cut is graded as it stands: it has submitted nothing.
    assert [r["eval/reward"] for r in evaluations] == [0.5, 0.5]
    assert evaluations[0]["eval/unscored_fraction"] == 0.0
    assert evaluations[0]["eval/truncated_fraction"] == 0.5
    assert evaluations[0]["eval/turns_mean"] == 3.0
    assert agents.states()


def test_evaluation_never_judges(agents: Agents, server: JudgeServer) -> None:
    agents.scenarios([sum_scenario(7, grade="none"), sum_scenario(8)], "heldout.jsonl")
    agents.script({0: right(0), EVERY: [END]})
    path = agents.agent(
        evaluation={"data": "heldout.jsonl"}, agent={"scenarios_per_update": 1, "judge": judge(server)}
    )
    agents.train(path)
    evaluations = [r for r in agents.metrics() if "eval/reward" in r]
    assert [(r["eval/reward"], r["eval/unscored_fraction"]) for r in evaluations] == [(0.0, 0.5)] * 2
    assert server.requests == []


def test_a_prompt_without_room_is_refused(agents: Agents) -> None:
    long = sum_scenario(1)
    long["user"] = "x" * 400
    agents.scenarios([sum_scenario(0), long])
    agents.script({EVERY: [END]})
    found = agents.train(agents.agent(agent={"max_trajectory_tokens": 300}), code=2)
    assert "scenarios.jsonl:2" in "\n".join(found.errors)
    assert "max_trajectory_tokens = 300 leaves no room for a turn" in "\n".join(found.errors)
    assert "scenarios.jsonl:1" not in "\n".join(found.errors)


def test_a_sampler_that_breaks_ends_the_run_with_its_words(agents: Agents) -> None:
    agents.script({0: right(0)})
    with pytest.raises(RolloutError, match="first: failed: trajectory 1 has no script for turn 0"):
        watched(agents.agent(agent=LIMITS | {"max_dropped_fraction": 0.5}))


def test_what_is_recorded(agents: Agents, server: JudgeServer) -> None:
    """Whole conversations with calls and results, rewards of steps, and what the judge said."""
    agents.scenarios([sum_scenario(0, grade="step"), *ungraded()[1:]])
    agents.script(
        {0: right(0), **{n: wrong(0) for n in (1, 2, 3)}, **{n: [f"worth 0.{n}"] for n in range(4, 8)}}
    )
    agents.train(agents.agent(agent={"judge": judge(server)}, observe={"directory": "seen"}))
    records = [json.loads(line) for line in (agents / "seen" / "observe.jsonl").read_text().splitlines()]
    by_kind = {
        kind: {r["member"]: r for r in records if r["kind"] == kind} for kind in ("rollout", "outcome")
    }
    first = by_kind["rollout"]["1.0.0"]
    assert [m["role"] for m in first["messages"]] == ["assistant", "tool", "assistant", "tool"]
    assert first["messages"][0]["tool_calls"][0]["name"] == "add"
    assert first["messages"][1]["content"] == "1"
    [[start, reward]] = by_kind["outcome"]["1.0.0"]["step_rewards"]
    assert (start, reward) == (first["tokens"]["count"], 1.0)
    judged = by_kind["outcome"]["1.1.0"]
    assert (judged["reward"]["kind"], judged["total"]) == ("missing", 0.4)
    assert judged["judgement"]["explanation"].startswith("because")


def test_servers_of_a_file_must_be_stateless_beside_an_environment(agents: Agents) -> None:
    servers = {"mcpServers": {"calc": {"command": "python3", "args": ["server.py"]}}}
    (agents / "mcp.json").write_text(json.dumps(servers))
    agents.script({EVERY: [END]})
    found = agents.train(agents.agent(agent={"mcp_config": "mcp.json"}), code=2)
    assert "MCP server 'calc'" in "\n".join(found.errors)
    assert "stateless must be true" in "\n".join(found.errors)
