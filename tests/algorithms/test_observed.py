"""`[observe]` in a run: the records are the rollouts, and a disk that fills up costs records only."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import Rollouts

OBSERVE: dict[str, Any] = {"observe": {"directory": "observe"}}


def records(rollouts: Rollouts, kind: str) -> list[dict[str, Any]]:
    text = (rollouts / "observe" / "observe.jsonl").read_text(encoding="utf-8")
    return [record for line in text.splitlines() if (record := json.loads(line))["kind"] == kind]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_rollouts_are_recorded(rollouts: Rollouts, algorithm: str) -> None:
    make = {"grpo": rollouts.grpo, "ppo": rollouts.ppo}[algorithm]
    rollouts.train(make())
    alone = rollouts.adapter
    rollouts.train(make(**OBSERVE, evaluation={"data": "heldout.jsonl"}))
    assert rollouts.adapter == alone  # watching changes nothing
    assert len(records(rollouts, "update")) == 2
    answers = 2 * {"grpo": 6, "ppo": 4}[algorithm]
    assert len(records(rollouts, "rollout")) >= answers
    assert (rollouts / "observe" / "index.html").is_file()


@pytest.fixture
def small_disk(rollouts: Rollouts) -> Iterator[Path]:
    """A file system of 64 kB at `observe`."""
    directory = rollouts / "observe"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode and os.environ.get("CI"):
        pytest.fail(f"CI must be able to mount a small file system: {done.stderr.strip()}")
    if done.returncode:
        pytest.skip(f"a file system of its own needs root ({done.stderr.strip()}); tests/observe has others")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_disk_that_fills_up(rollouts: Rollouts, small_disk: Path) -> None:
    keys = {"updates": 12, "group_size": 8}
    rollouts.train(rollouts.grpo(grpo=keys))
    alone = rollouts.adapter
    found = rollouts.train(rollouts.grpo(grpo=keys, **OBSERVE))
    assert rollouts.adapter == alone
    said = [line for line in found.err.splitlines() if "observe" in line and "No space left" in line]
    assert 1 <= len(said) == len(set(said))  # each of them once
    whole = [json.loads(line) for line in (small_disk / "observe.jsonl").read_text().splitlines()]
    assert whole  # every line that is there is whole
    assert sum(record["kind"] == "update" for record in whole) < 12
