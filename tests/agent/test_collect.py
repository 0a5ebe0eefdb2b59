"""`retrograd collect`: what is kept, what is refused and why, and every option."""

from __future__ import annotations

import json
import signal
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from tests.e2e.support import Outcome, finish_process, retrograd, start_process, wait_for

from .support import EVERY, SMALL, Agents, Turn, call, right, sum_scenario, wrong


@pytest.fixture
def agents(tmp_path: Path, tiny_model: Callable[..., Path]) -> Agents:
    return Agents(tmp_path, tiny_model(**SMALL))


def collect(agents: Agents, *arguments: object, code: int = 0, **tables: Any) -> Outcome:
    """Run the command; its files are `out.jsonl` and `report.json`."""
    files = ("--out", agents / "out.jsonl", "--report", agents / "report.json")
    return retrograd("collect", agents.agent(**tables), *files, *arguments, code=code)


def lines(agents: Agents, name: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (agents / name).read_text().splitlines()]


def report(agents: Agents) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((agents / "report.json").read_text())
    return found


def outcomes(agents: Agents, scenario: int = 0) -> list[str]:
    return [member["outcome"] for member in report(agents)["scenarios"][scenario]["members"]]


def answers(agents: Agents) -> list[str]:
    """What the traces submit."""
    return [_submitted(record["messages"]) for record in lines(agents)]


def _submitted(messages: Sequence[Mapping[str, Any]]) -> str:
    calls = [c["function"] for m in messages for c in m.get("tool_calls", ())]
    return str(next(c["arguments"]["answer"] for c in calls if c["name"] == "submit"))


def one_scenario(agents: Agents, *attempts: Sequence[Turn], **env: Any) -> None:
    """One scenario, and what each attempt at it writes."""
    agents.scenarios([sum_scenario(0, **env)])
    agents.script(dict(enumerate(attempts)))


# What is kept


def test_one_trace_for_each_solved_scenario(agents: Agents) -> None:
    script: dict[int | str, Sequence[Turn]] = {n: wrong(n // 2) for n in range(6)}
    script |= {1: right(0), 4: right(2)}
    agents.script(script)
    outcome = collect(agents, "--k", 2)
    assert answers(agents) == ["1", "3"]
    found = report(agents)
    assert [s["pass_rate"] for s in found["scenarios"]] == [0.5, 0.0, 0.5]
    assert [s["id"] for s in found["scenarios"]] == ["sum-0", "sum-1", "sum-2"]
    assert found["totals"] == {
        "scenarios": 3,
        "scenarios_passed": 2,
        "attempts": 6,
        "passed": 2,
        "pass_rate": 2 / 6,
        "kept": 2,
        "refused": {"not solved": 4},
        "left_out": {},
        "traces": 2,
        "turns": 4,
        "raw_turns": 0,
    }
    assert [m["stream"] for s in found["scenarios"] for m in s["members"]] == list(range(6))
    assert (found["seed"], found["k"], found["complete"]) == (42, 2, True)
    assert "2 traces of 2 of 3 scenarios, 4 assistant turns, 0 of them raw" in outcome.out
    assert "passed: 2 of 6 trajectories (33.3%)" in outcome.out
    assert "no attempt solved: sum-1" in outcome.out


def test_every_reason_of_refusal(agents: Agents) -> None:
    one_scenario(
        agents,
        right(0),
        wrong(0),
        [call("crash")],
        [call("nothing"), *right(0)],
        [call("add", a="one"), *right(0)],
        ["<tool_call>\nnonsense\n</tool_call>", *right(0)],
        [f"{call('add', a=1, b=2)}\n<tool_call>\nnonsense\n</tool_call>", *right(0)],
        [call("add", a=1, b=2)] * 4,
        [list(b"a" * 200)],
        [[]],
        right(0),
        [call("add", a=1, b=1), *right(0)],
        [call("fail"), *right(0)],
    )
    collect(agents, "--k", 13)
    assert outcomes(agents) == [
        "kept",
        "not solved",
        "failed",
        "malformed call",
        "malformed call",
        "malformed call",
        "malformed call",
        "truncated: max_turns",
        "truncated: max_new_tokens_per_turn",
        "empty turn",
        "duplicate",
        "not among the best",
        "not among the best",
    ]
    members = report(agents)["scenarios"][0]["members"]
    assert members[2]["detail"] == "the world broke"
    assert members[1]["detail"] == "0, and 1 is needed"
    assert report(agents)["scenarios"][0]["refused"] == report(agents)["totals"]["refused"]
    assert report(agents)["totals"]["refused"]["malformed call"] == 4
    assert report(agents)["totals"]["left_out"] == {"not among the best": 2, "duplicate": 1}


def test_a_turn_without_a_call_is_no_example(agents: Agents) -> None:
    one_scenario(agents, ["Hm.", *right(0)], right(0))
    collect(agents, "--k", 2, agent={"end_on_no_tool_call": False})
    assert outcomes(agents) == ["turn without a call", "kept"]


def test_a_world_that_cannot_start_is_a_failure(agents: Agents) -> None:
    agents.scenarios([sum_scenario(0, fail_setup="no disk"), sum_scenario(1)])
    agents.script({2: right(1), 3: right(1)})
    collect(agents, "--k", 2)
    assert outcomes(agents, 0) == ["failed", "failed"]
    assert report(agents)["scenarios"][0]["members"][0]["detail"] == "no disk"
    assert answers(agents) == ["2"]


def test_the_best_come_first(agents: Agents) -> None:
    """A higher reward, then fewer turns."""
    one_scenario(agents, [call("add", a=5, b=5), *wrong(0)], wrong(0), right(0), partial=0.75)
    collect(agents, "--k", 3, "--keep", 3, "--min-reward", 0.5)
    assert answers(agents) == ["1", "7", "7"]
    assert [len(record["messages"]) for record in lines(agents)] == [5, 3, 5]
    assert [m["score"] for m in report(agents)["scenarios"][0]["members"]] == [0.75, 0.75, 1.0]


def test_keep_is_the_most_of_a_scenario(agents: Agents) -> None:
    attempts = [[call("add", a=n, b=1), *right(0)] for n in range(4)]
    one_scenario(agents, *attempts)
    collect(agents, "--k", 4, "--keep", 3)
    assert len(lines(agents)) == 3
    assert outcomes(agents) == ["kept", "kept", "kept", "not among the best"]


def test_rewards_of_steps_count(agents: Agents) -> None:
    one_scenario(agents, wrong(0), right(0), grade="step")
    collect(agents, "--k", 2)
    assert outcomes(agents) == ["not solved", "kept"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [((), ["2"]), (("--min-reward", "0.25"), ["2", "8"]), (("--min-reward", "3"), [])],
)
def test_min_reward_replaces_the_reward_of_success(
    agents: Agents, options: Sequence[str], kept: list[str]
) -> None:
    verify = {"command": ["true"], "reward_on_success": 2.0}
    agents.scenarios([sum_scenario(1, verify=verify, partial=0.25)])
    agents.script({0: wrong(1), 1: right(1)})
    tables = {"agent": {"environment": {"type": "sums", "bonus": 2.0}}}
    outcome = collect(agents, "--k", 2, "--keep", 2, *options, code=0 if kept else 1, **tables)
    if kept:
        assert answers(agents) == kept
    else:
        assert not (agents / "out.jsonl").exists()
        assert "no traces to write" in outcome.err
        assert "2, and 3 is needed" in outcome.err or "0.25, and 3 is needed" in outcome.err


def test_nothing_kept_is_a_failure_with_the_reasons(agents: Agents) -> None:
    one_scenario(agents, wrong(0), wrong(0), partial=0.5)
    (agents / "out.jsonl").write_text("mine\n")
    outcome = collect(agents, "--k", 2, "--force", code=1)
    assert "not solved: 0.5, and 1 is needed; the best reward was 0.5, and --min-reward sets" in outcome.err
    assert "is left as it was" in outcome.err
    assert (agents / "out.jsonl").read_text() == "mine\n"
    assert report(agents)["out"] is None
    assert report(agents)["totals"]["pass_rate"] == 0.0


# Verification


def test_a_scenario_without_a_reward_is_kept_unless_it_must_be_verified(agents: Agents) -> None:
    agents.scenarios([sum_scenario(0, grade="none"), sum_scenario(1)])
    script = {0: wrong(0), 1: right(1)}
    agents.script(dict(script))
    collect(agents, "--k", 1)
    assert answers(agents) == ["7", "2"]
    assert [m["score"] for s in report(agents)["scenarios"] for m in s["members"]] == [None, 1.0]
    collect(agents, "--k", 1, "--require-verified", "--force")
    assert answers(agents) == ["2"]
    assert outcomes(agents) == ["unverified"]


def test_unverified_traces_are_allowed_if_they_ended_cleanly(agents: Agents) -> None:
    one_scenario(agents, wrong(0), [call("crash")], right(0))
    collect(agents, "--k", 3, "--keep", 3, "--allow-unverified")
    assert answers(agents) == ["1", "7"]
    assert outcomes(agents) == ["kept", "failed", "kept"]


def test_a_reward_that_is_an_error_is_no_reward(agents: Agents) -> None:
    one_scenario(agents, right(0), grade="error", verify={"command": ["true"]})
    collect(agents, "--k", 1, code=1)
    assert outcomes(agents) == ["unscored"]
    assert "cannot be graded" in report(agents)["scenarios"][0]["members"][0]["detail"]
    collect(agents, "--k", 1, "--allow-unverified", "--force")
    assert answers(agents) == ["1"]


JUDGE = """
import json, sys

for line in sys.stdin:
    group = json.loads(line)
    scores = []
    for member in group["members"]:
        text = json.dumps(member)
        score = 0.9 if "best" in text else 0.4 if "good" in text else 0.1
        scores.append({"id": member["id"], "score": score})
    if "refuse" in json.dumps(group):
        scores = []
    print(json.dumps({"group": group["group"], "scores": scores}), flush=True)
"""


def judged(agents: Agents, *attempts: Sequence[Turn]) -> dict[str, Any]:
    """One scenario without a reward, and a judge that likes `best`, and `good` less."""
    import sys

    one_scenario(agents, *attempts, grade="none")
    (agents / "judge.py").write_text(JUDGE)
    return {"judge": {"type": "command", "command": [sys.executable, str(agents / "judge.py")]}}


def test_a_judge_ranks_what_no_environment_grades(agents: Agents) -> None:
    judge = judged(
        agents,
        [call("submit", answer="bad")],
        [call("submit", answer="good")],
        [call("crash")],
        [call("submit", answer="best")],
    )
    collect(agents, "--k", 4, "--keep", 2, agent=judge)
    assert answers(agents) == ["best", "good"]
    assert [m["score"] for m in report(agents)["scenarios"][0]["members"]] == [0.1, 0.4, None, 0.9]
    collect(agents, "--k", 4, "--keep", 4, "--min-reward", 0.4, "--force", agent=judge)
    assert answers(agents) == ["best", "good"]
    assert outcomes(agents) == ["not solved", "kept", "failed", "kept"]


def test_a_judge_is_not_asked_where_the_environment_grades(agents: Agents) -> None:
    judge = judged(agents, right(0), [call("submit", answer="refuse")])
    agents.scenarios([sum_scenario(0)])
    collect(agents, "--k", 2, agent=judge)
    assert answers(agents) == ["1"]


def test_a_verdict_that_fails_is_no_score(agents: Agents) -> None:
    judge = judged(agents, [call("submit", answer="refuse")], [call("submit", answer="best")])
    outcome = collect(agents, "--k", 2, code=1, agent=judge)
    assert outcomes(agents) == ["judge failed", "judge failed"]
    assert "judge failed" in outcome.err


def test_a_run_with_a_judge_alone(agents: Agents) -> None:
    import sys

    agents.scenarios([{"id": "a", "user": "Say something."}])
    agents.script({0: ["bad"], 1: ["the best"]})
    (agents / "judge.py").write_text(JUDGE)
    judge = {"type": "command", "command": [sys.executable, str(agents / "judge.py")]}
    collect(agents, "--k", 2, agent={"environment": None, "judge": judge})
    [record] = lines(agents)
    assert record == {
        "messages": [
            {"role": "user", "content": "Say something."},
            {"role": "assistant", "content": "the best"},
        ]
    }


# Options


def test_limit_takes_the_first_scenarios(agents: Agents) -> None:
    agents.script({0: right(0), 1: right(1)})
    collect(agents, "--k", 1, "--limit", 2)
    assert answers(agents) == ["1", "2"]
    assert report(agents)["totals"]["scenarios"] == 2


def test_raw_writes_the_text_and_its_tokens(agents: Agents) -> None:
    one_scenario(agents, right(0))
    collect(agents, "--k", 1, "--raw")
    turns = [m for m in lines(agents)[0]["messages"] if m["role"] == "assistant"]
    assert [turn["content"] for turn in turns] == right(0)
    assert all(turn["raw"] and turn["token_ids"] for turn in turns)
    assert report(agents)["totals"]["raw_turns"] == 2


def test_files_are_replaced_with_force_alone(agents: Agents) -> None:
    one_scenario(agents, right(0))
    for name in ("out.jsonl", "report.json"):
        (agents / name).write_text("mine\n")
    outcome = collect(agents, "--k", 1, code=2)
    assert len(outcome.errors) == 3
    assert "--out: " in outcome.err
    assert "--report: " in outcome.err
    assert "--force replaces it" in outcome.err
    assert (agents / "out.jsonl").read_text() == (agents / "report.json").read_text() == "mine\n"
    collect(agents, "--k", 1, "--force")
    assert answers(agents) == ["1"]
    assert not [path for path in agents.directory.iterdir() if ".tmp" in path.name]


def test_the_scenarios_are_never_replaced(agents: Agents) -> None:
    before = (agents / "scenarios.jsonl").read_text()
    path = agents.agent()
    outcome = retrograd("collect", path, "--out", agents / "scenarios.jsonl", "--force", code=2)
    assert "is agent.scenarios" in outcome.err
    assert (agents / "scenarios.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pairs", "--keep", "2"), "--keep has no effect with --pairs"),
        (("--min-gap", "0.2"), "--min-gap applies to --pairs"),
        (("--pairs", "--k", "1"), "--k 2 or more"),
        (("--api", "--raw"), "the model behind --api gives none"),
        (("--api", "--model", "m.gguf"), "--model has no effect with --api"),
        (("--api", "--adapter", "a.gguf"), "--adapter has no effect with --api"),
        (("--min-reward", "nan"), "must be a finite number"),
        (("--k", "0"), "0 is not in the range"),
        (("--keep", "0"), "0 is not in the range"),
        (("--seed", "-1"), "-1 is not in the range"),
        (("--api",), "agent.collect_api: --api needs this section"),
        (("--report", "{}/out.jsonl"), "is the file of --out"),
    ],
)
def test_usage(agents: Agents, arguments: Sequence[str], message: str) -> None:
    given = [argument.format(agents.directory) for argument in arguments]
    outcome = retrograd("collect", agents.agent(), "--out", agents / "out.jsonl", *given, code=2)
    assert message in outcome.err


def test_a_run_of_another_algorithm_has_no_scenarios(agents: Agents) -> None:
    outcome = retrograd("collect", agents.toml(), "--out", agents / "out.jsonl", code=2)
    assert "run.algorithm: collect needs the scenarios of an agentic run, this one is 'sft'" in outcome.err


def test_bad_scenarios_are_all_named(agents: Agents) -> None:
    agents.scenarios([{"id": "a"}, {"user": "b"}])
    outcome = collect(agents, code=2)
    assert "scenarios.jsonl:1: user" in outcome.err
    assert "scenarios.jsonl:2: id" in outcome.err


def test_an_output_that_cannot_be_written_is_found_first(agents: Agents) -> None:
    closed = agents / "closed"
    closed.mkdir()
    (agents / "file").write_text("")
    outcome = retrograd("collect", agents.agent(), "--out", agents / "file" / "out.jsonl", code=2)
    assert "is not a directory" in outcome.err
    outcome = retrograd("collect", agents.agent(), "--out", closed, code=2)
    assert "is a directory" in outcome.err
    assert stat.S_ISDIR(closed.stat().st_mode)


def sampled(agents: Agents, name: str, *arguments: object, **tables: Any) -> list[dict[str, Any]]:
    """Traces of the model itself, which writes what it likes."""
    path = agents.agent(training={"ctx": 1536, **tables.pop("training", {})}, **tables)
    options = ("--out", agents / name, "--allow-unverified", "--keep", 9, "--force")
    retrograd("collect", path, *options, *arguments)
    return lines(agents, name)


def test_the_seed_decides(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """Whatever is decoded together; another seed is another collection."""
    agents = Agents(tmp_path, tiny_model(**SMALL, metadata={"tokenizer.ggml.eos_token_id": 162}))
    first = sampled(agents, "a.jsonl")
    assert len(first) > 3
    assert sampled(agents, "b.jsonl", training={"generation_concurrency": 1}) == first
    assert sampled(agents, "c.jsonl", "--seed", 42) == first
    other = sampled(agents, "d.jsonl", "--seed", 7)
    assert other != first
    assert sampled(agents, "e.jsonl", agent={"seed": 7}) == other
    some = sampled(agents, "f.jsonl", "--limit", 1)
    assert some == first[: len(some)]


def test_an_adapter_and_another_model_generate(
    agents: Agents, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    sft = agents.toml("sft.toml", training={"ctx": 128, "micro_batch": 64, "lr": 0.5})
    retrograd("train", sft)
    plain = sampled(agents, "a.jsonl", "--k", 4)
    tuned = sampled(agents, "b.jsonl", "--k", 4, "--adapter", agents / "out" / "adapter.gguf", lora={})
    other = sampled(agents, "c.jsonl", "--k", 4, "--model", tiny_model(**SMALL, seed=5))
    assert plain != tuned
    assert plain != other


def test_the_page_names_every_option_and_reason(repo_root: Path) -> None:
    page = (repo_root / "docs" / "collecting.md").read_text()
    from retrograd_plugins.commands.collect import collect as command

    for parameter in command.params:
        if isinstance(parameter, click.Option):
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert f"`{option}" in page, option
    reasons = {"failed", "malformed call", "truncated: …", "empty turn", "turn without a call", "unscored"}
    for reason in reasons | {"not solved", "unverified", "judge failed", "duplicate", "not among the best"}:
        assert f"`{reason}`" in page, reason


# Pairs


def test_pairs_of_the_best_and_the_worst(agents: Agents) -> None:
    agents.scenarios([sum_scenario(0, partial=0.25), sum_scenario(1), sum_scenario(2, partial=0.75)])
    agents.script(
        {
            **{0: right(0), 1: [call("nothing"), *wrong(0)], 2: wrong(0)},
            **{3: wrong(1), 4: wrong(1), 5: wrong(1)},
            **{6: right(2), 7: wrong(2), 8: [call("crash")]},
        }
    )
    outcome = collect(agents, "--k", 3, "--pairs")
    [pair] = lines(agents)
    assert set(pair) == {"prompt", "chosen", "rejected", "tools"}
    assert pair["prompt"] == [{"role": "user", "content": "What is 0 + 1?"}]
    assert [pair[side][0]["role"] for side in ("chosen", "rejected")] == ["assistant", "assistant"]
    assert _submitted(pair["chosen"]) == "1"
    assert _submitted(pair["rejected"]) == "7"
    assert "wrote" in outcome.out
    assert "1 pairs of 1 of 3 scenarios" in outcome.out
    assert "1 no attempt is worse by 0.5" in outcome.out
    collect(agents, "--k", 3, "--pairs", "--min-gap", 0.25, "--force")
    assert [_submitted(pair["rejected"]) for pair in lines(agents)] == ["7", "9"]
    assert report(agents)["totals"]["pairs"] == 2


def test_equal_rewards_make_no_pair(agents: Agents) -> None:
    one_scenario(agents, right(0), [call("add", a=1, b=1), *right(0)])
    outcome = collect(agents, "--k", 2, "--pairs", "--min-gap", 0, code=1)
    assert "no pairs to write" in outcome.err


# Stopping


def test_an_interrupted_collection_writes_what_is_complete(agents: Agents, repo_root: Path) -> None:
    agents.scenarios([sum_scenario(number) for number in range(3)])
    waits = [call("wait", seconds=60)]
    mark = agents / "waiting"
    agents.script({0: right(0), 1: wrong(0), 2: right(1), 3: waits, 4: waits, 5: waits, EVERY: waits})
    (agents / "mark.py").write_text(
        "from pathlib import Path\n"
        "from tests.agent.support import SumsWorld\n"
        "step, count = SumsWorld.step, []\n"
        "async def marked(self, name, arguments):\n"
        "    count.append(name)\n"
        "    if count.count('wait') == 3 and count.count('submit') == 3:\n"
        f"        Path({str(mark)!r}).touch()\n"
        "    return await step(self, name, arguments)\n"
        "SumsWorld.step = marked\n"
    )
    path = agents.agent(plugins={"load": ["hooks.py", "mark.py"]})
    arguments = ("collect", path, "--out", agents / "out.jsonl", "--report", agents / "report.json")
    process = start_process(*arguments, "--k", "2", environment={"PYTHONPATH": str(repo_root)})
    wait_for(mark, process)
    process.send_signal(signal.SIGINT)
    outcome = finish_process(process, arguments, 1)
    assert "what is complete will be written" in outcome.err
    assert "1 of 3 scenarios were complete" in outcome.err, outcome
    assert answers(agents) == ["1"]
    assert "1 of 3 scenarios were complete" in outcome.err
    assert report(agents)["complete"] is False
    assert [s["id"] for s in report(agents)["scenarios"]] == ["sum-0"]
