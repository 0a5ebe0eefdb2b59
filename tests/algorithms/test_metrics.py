"""`docs/metrics.md` names what runs write, and nothing else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.judges.server import JudgeServer

from .support import Rollouts, watched
from .test_judged import PROGRAM, judged

OF_OTHERS = ("agent/", "env/", "distill/", "preference/")
"""Metrics of algorithms that have tests of their own."""


def documented(page: Path) -> set[str]:
    """Names in the first column of the page's tables."""
    rows = [line.split("|")[1] for line in page.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row) if not name.startswith(OF_OTHERS)}


def test_the_page_and_the_runs_agree(rollouts: Rollouts, server: JudgeServer, repo_root: Path) -> None:
    evaluation = {"data": "heldout.jsonl"}
    written: set[str] = set()

    def collect() -> None:
        for record in rollouts.metrics():
            written.update(set(record) - {"step", "time", "nonfinite"})

    rollouts.train(rollouts.toml(training={"micro_batch": 128}, evaluation={"data": "train.jsonl"}))
    collect()
    rollouts.train(rollouts.ppo(evaluation=evaluation))
    collect()
    tables = {"kl_coefficient": 0.1, "loss": "grpo_tis"}
    watch = watched(rollouts.grpo(grpo=judged(server, **tables), evaluation=evaluation))
    collect()
    report = watch.run.algorithm.evaluate(samples=3)
    assert report is not None
    written.update(re.sub("@3$", "@K", name) for name in report.metrics)
    rollouts.python("judge.py", PROGRAM)
    judge = {"type": "command", "command": [sys.executable, "judge.py"]}
    rollouts.train(rollouts.grpo(grpo={"judge_weight": 0.5, "judge": judge}))
    collect()
    assert sorted(written) == sorted(documented(repo_root / "docs" / "metrics.md"))


def test_records_of_updates_without_signal_have_what_is_known(rollouts: Rollouts) -> None:
    rollouts.python("reward.py", "def score(prompt, completion):\n    return 1.0\n")
    rollouts.train(rollouts.grpo(), code=1)
    [record, _] = rollouts.updates()
    assert record["reward/mean"] == 1.0
    assert record["reward/zero_spread_fraction"] == 1.0
    assert record["batch/groups_trained"] == 0.0
    assert record["train/update"] == 1.0
    assert "train/loss" not in record
