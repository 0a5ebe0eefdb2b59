"""Commands beside `train` on files of algorithms that learn from rewards."""

from __future__ import annotations

import re

import pytest

from tests.rewards.support import nothing_left, program

from .support import Rollouts

GOOD = """
handshake()
while True:
    lines, end = batch()
    open('asked', 'w')
    answer(lines); write(end)
"""


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_check_profile_and_bench(rollouts: Rollouts, algorithm: str) -> None:
    """They write nothing, and no reward program is left; a rehearsal asks for no reward."""
    command = {"reward": None, "reward_command": list(program(rollouts.directory, GOOD))}
    make = {"grpo": rollouts.grpo, "ppo": rollouts.ppo}[algorithm]
    tables = {"observe": {"directory": "observe"}, "evaluation": {"data": "heldout.jsonl"}}
    path = make(**{algorithm: {**command, "updates": 3}}, **tables)
    before = sorted(rollouts.directory.iterdir())
    with nothing_left(rollouts.directory):
        found = rollouts.command("check", path)
        assert "5 prompts, the longest of" in found.out
        assert not (rollouts / "asked").exists()
        found = rollouts.command("profile", path, "--steps", 2)
        shares = re.findall(r"^timing/(\w+) .*?([\d.]+)%$", found.out, re.MULTILINE)
        whole = sum(
            float(share) for name, share in shares if name not in ("training_seconds", "update_seconds")
        )
        assert whole == pytest.approx(100.0, abs=1.0)
        assert {"generation_seconds", "reward_seconds", "step_seconds"} <= {name for name, _ in shares}
        found = rollouts.command("bench", path, "--samples", 2)
        assert "pass@2" in found.out
    (rollouts / "asked").unlink()
    assert sorted(rollouts.directory.iterdir()) == before
