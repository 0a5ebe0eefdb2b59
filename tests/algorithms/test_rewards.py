"""Rewards that fail in the middle of a run: what is trained, what is counted, what is said, what is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.support import nothing_left, program, wait_until

from .support import Rollouts, watched

SECOND_BATCH = """
handshake()
lines, end = batch()
answer(lines); write(end)
lines, end = batch()
"""
GOOD = SECOND_BATCH + "answer(lines); write(end)\nsys.stdin.read()\n"


@pytest.fixture(autouse=True)
def no_process_left(rollouts: Rollouts) -> Iterator[None]:
    with nothing_left(rollouts.directory):
        yield


def command(rollouts: Rollouts, body: str, **keys: Any) -> dict[str, Any]:
    """Keys of `[grpo]` or `[ppo]` that run a reward program."""
    return {"reward": None, "reward_command": list(program(rollouts.directory, body)), **keys}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(600)", ["did not answer in time", "in batch 2", "_seconds is 1"]),
        ("answer(lines[:2]); sys.exit('out of paper')", ["exit status 1", "number 3 of 6", "out of paper"]),
        ("os.kill(os.getpid(), 9)", ["was killed by SIGKILL"]),
        ("answer(lines); write(end); write(end); sys.stdin.read()", ["closed the batch|nothing asked for"]),
        ("answer(lines[1:])", ["'_retrograd_index': 1 where 0 is due"]),
        ("answer([lines[0]] * 2)", ["'_retrograd_index': 0 where 1 is due"]),
        ("echo(lines[0], reward=float('nan'))", ["NaN is not a number"]),
        ("print('x' * 9 * 2**20)", ["a line longer than 8,388,608 bytes"]),
        ("echo(lines[0], reward=1, judge_weight=1)", ["this run has no judge"]),
    ],
)  # fmt: skip
def test_a_program_that_fails_in_the_second_update(rollouts: Rollouts, body: str, words: list[str]) -> None:
    """The run fails and says why, and can go on once the program is mended: nothing is lost."""
    path = rollouts.grpo(grpo=command(rollouts, SECOND_BATCH + body, reward_timeout_seconds=1.0))
    found = rollouts.train(path, code=1)
    text = "\n".join(found.errors)
    assert text.startswith("error: reward program `")
    for word in words:
        assert any(choice in text for choice in word.split("|")), text
    assert "go on from step 1 with --resume" in found.err
    assert not (rollouts / "out" / "adapter.gguf").exists()


def test_a_mended_program_goes_on_as_if_nothing_had_happened(rollouts: Rollouts) -> None:
    keys = command(rollouts, GOOD)
    rollouts.train(rollouts.grpo(grpo=keys))
    whole = rollouts.adapter
    (rollouts / "out").rename(rollouts / "out.whole")
    command(rollouts, SECOND_BATCH + "os.abort()")
    rollouts.train(rollouts / "run.toml", code=1)
    command(rollouts, "handshake()\nlines, end = batch()\nanswer(lines); write(end)\nsys.stdin.read()\n")
    rollouts.train(rollouts / "run.toml", "--resume")
    assert rollouts.adapter == whole


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_oneshot(rollouts: Rollouts, algorithm: str) -> None:
    """A process a batch; it has the same rewards, so the same run, as a persistent one."""
    keys = command(rollouts, GOOD)
    make = {"grpo": rollouts.grpo, "ppo": rollouts.ppo}[algorithm]
    rollouts.train(make(**{algorithm: keys}))
    persistent = rollouts.adapter
    body = "for line in map(json.loads, sys.stdin): write({'reward': len(line['completion'])})\n"
    rollouts.train(make(**{algorithm: command(rollouts, body, reward_mode="oneshot")}))
    assert rollouts.adapter == persistent
    body = "lines = list(sys.stdin)\nif os.path.exists('seen'): sys.exit(3)\nopen('seen', 'w')\n"
    body += "for line in lines: write({'reward': len(line)})\n"
    found = rollouts.train(make(**{algorithm: command(rollouts, body, reward_mode="oneshot")}), code=1)
    assert "ended with exit status 3 (in batch 2, oneshot)" in "\n".join(found.errors)


HANGS = {
    "program": "open('asked', 'w'); time.sleep(600)",
    "program that reads no more": "open('asked', 'w'); answer(lines[:1]); time.sleep(600)",
    "function": """
        import time, zlib
        from pathlib import Path

        calls = []

        def score(prompt, completion):
            calls.append(prompt)
            if len(calls) > 8 and not Path({asked!r}).exists():
                Path({asked!r}).touch()
                try:
                    time.sleep(600)
                except Exception:
                    return 0.0  # no fault of the answer
            return zlib.crc32((prompt + completion).encode()) % 11 / 10
        """,
}


@pytest.mark.parametrize("what", HANGS)
def test_ctrl_c_does_not_wait_for_a_reward_that_hangs(rollouts: Rollouts, what: str) -> None:
    """The first one ends the run at once, its work saved; a resumed run asks again."""
    asked = rollouts / "asked"
    keys: dict[str, Any] = {}
    if what == "function":
        rollouts.python("reward.py", HANGS[what].format(asked=str(asked)))
    else:
        keys = command(rollouts, SECOND_BATCH + HANGS[what])
    path = rollouts.grpo(grpo=keys)

    def signalled() -> None:
        wait_until(asked.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=signalled)
    thread.start()
    started = time.monotonic()
    found = rollouts.train(path, code=1)
    thread.join()
    assert time.monotonic() - started < 60
    assert "stopping after this step" in found.err
    assert "interrupted after 1 steps" in found.out
    assert rollouts.states("out/adapter.checkpoints") == ["step-000001.state"]
    if what == "function":
        rollouts.train(path, "--resume")
        resumed = rollouts.adapter
        rollouts.train(path)
        assert rollouts.adapter == resumed


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_weight_of_a_judge_that_is_not_there(rollouts: Rollouts, algorithm: str) -> None:
    """As from a program: it would be ignored."""
    rollouts.python(
        "reward.py",
        """
        from retrograd_hookspecs import Score

        def score(prompt, completion):
            return Score(kind="value", value=float(len(completion)), judge_weight=0.5)
        """,
    )
    path = getattr(rollouts, algorithm)(evaluation={"data": "heldout.jsonl"})
    for name in ("train", "bench"):
        text = "\n".join(rollouts.command(name, path, code=1).errors)
        assert "the reward gave 3 of 3 answers a judge_weight, first 0.5, but this run has no judge" in text
        assert "leave it out of the score, or add [grpo.judge]" in text


SOME = """
import zlib

def score(prompt, completion):
    number = zlib.crc32((prompt + completion).encode())
    if number % 4 == 0:
        return None
    if number % 4 == 1:
        raise ValueError(f"no grade for {prompt}")
    if number % 16 == 2:
        return float("nan")
    return 5.0 + number % 7
"""


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_answers_without_a_reward_are_left_out_and_counted(rollouts: Rollouts, algorithm: str) -> None:
    rollouts.python("reward.py", SOME)
    if algorithm == "grpo":
        watch = watched(rollouts.grpo(grpo={"group_size": 12}))
    else:
        watch = watched(rollouts.ppo(ppo={"rollout_batch_size": 16}))
    for groups, report in zip(watch.groups, watch.reports, strict=True):
        members = [rollout for group in groups for rollout in group.members]
        lost = [rollout for rollout in members if rollout.reward.kind != "value"]
        assert 0 < len(lost) < len(members)
        for rollout in lost:
            assert rollout.excluded.startswith(f"reward {rollout.reward.kind}: ")
            assert (rollout.total, rollout.advantage) == (None, None)
        kept = [rollout for rollout in members if rollout.reward.kind == "value"]
        assert all(rollout.total == rollout.reward.value >= 5.0 for rollout in kept)
        metrics = report.metrics
        assert metrics["reward/min"] >= 5.0  # nothing was made up
        for kind in ("missing", "error"):
            share = sum(rollout.reward.kind == kind for rollout in members) / len(members)
            assert metrics[f"reward/{kind}_fraction"] == pytest.approx(share)
        trained = [r for group in groups if not group.dropped for r in group.members if not r.excluded]
        assert metrics["batch/answers_trained"] == len(trained)
    explanations = {r.reward.explanation for g in watch.groups[0] for r in g.members}
    assert any("returned None" in text for text in explanations)
    assert any(text.startswith("ValueError: no grade for") for text in explanations)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_lost_rewards_are_said_once(rollouts: Rollouts, algorithm: str) -> None:
    rollouts.python("reward.py", SOME)
    make = {"grpo": rollouts.grpo, "ppo": rollouts.ppo}[algorithm]
    tables = {"grpo": {"group_size": 12}, "ppo": {"rollout_batch_size": 16}}
    found = rollouts.train(make(**{algorithm: tables[algorithm]}))
    [line] = [line for line in found.err.splitlines() if "answers have no reward" in line]
    assert line.startswith("warning: ")
    assert "are left out; first: 1." in line


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ValueError('no key')", ["none of the 6 answers has", "reward error: ValueError: no key"]),
        ("return None", ["none of the 6 answers has", "reward missing: the reward function"]),
        ("return float('nan')", ["reward error: the reward function returned nan, not a finite number"]),
        ("return 1.0", ["2 groups: all rewards are equal"]),
    ],
)  # fmt: skip
def test_an_update_without_any_reward_says_so(rollouts: Rollouts, source: str, words: list[str]) -> None:
    rollouts.python("reward.py", f"def score(prompt, completion):\n    {source}\n")
    found = rollouts.train(rollouts.grpo(), code=1)
    text = "\n".join(found.errors)
    assert text.startswith("error: the run took no optimizer step: update 2: ")
    for word in words:
        assert word in text
        assert "no optimizer step: update 1: " in found.err
    records = rollouts.updates()
    assert [record["batch/groups_trained"] for record in records] == [0.0, 0.0]


def test_ppo_without_any_reward_says_so(rollouts: Rollouts) -> None:
    rollouts.python("reward.py", "def score(prompt, completion):\n    raise ValueError('no key')\n")
    text = "\n".join(rollouts.train(rollouts.ppo(), code=1).errors)
    assert "4 of 4 answers have no reward; first: reward error: ValueError: no key" in text


def test_a_reward_of_a_plugin_that_returns_nan(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd_hookspecs import Score
    from retrograd_plugins.rewards.python import PythonReward

    def score(self: Any, answers: Any) -> list[Score]:
        return [Score(kind="value", value=float("inf") if i == 0 else float(i)) for i in range(len(answers))]

    monkeypatch.setattr(PythonReward, "score", score)
    [record, _] = (rollouts.train(rollouts.grpo()), rollouts.updates())[1]
    assert record["reward/error_fraction"] == pytest.approx(1 / 6)
    assert record["batch/answers_trained"] == 5
    monkeypatch.setattr(PythonReward, "score", lambda self, answers: [])
    found = rollouts.train(rollouts.grpo(), code=1)
    assert found.errors[0] == "error: the reward gave 0 scores for 6 answers"


def test_a_program_of_bad_prompts_is_ended(rollouts: Rollouts) -> None:
    """It starts before the prompts are read; a mistake in them leaves no process."""
    Path(rollouts / "prompts.jsonl").write_text('{"messages": []}\n')
    rollouts.train(rollouts.grpo(grpo=command(rollouts, GOOD)), code=2)
