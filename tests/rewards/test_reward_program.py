"""`retrograd.reward_program.serve`: both modes, what it keeps off the protocol, how it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retrograd.testing.rewards import check_reward
from retrograd_hookspecs import Answer, RolloutError, Score
from retrograd_plugins.rewards.command import CommandConfig, CommandReward

from .support import ANSWERS, nothing_left

ROOT = Path(__file__).resolve().parents[2]
MODES = pytest.mark.parametrize("mode", ["persistent", "oneshot"])


def served(directory: Path, function: str, options: str = "", **config: Any) -> CommandReward:
    """A reward whose program serves the function `reward`."""
    text = f"from retrograd.reward_program import serve\n{function}\nserve(reward{options})\n"
    (directory / "served.py").write_text(text, encoding="utf-8")
    show = config.pop("show", lambda line: None)
    config.setdefault("timeout_seconds", 20.0)
    command = (sys.executable, "served.py")
    return CommandReward(CommandConfig(command=command, **config), directory, show=show)


@MODES
@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("def reward(prompt, completion): return len(completion)", ""),
        ("def reward(prompts, completions): return map(len, completions)", ", batched=True"),
    ],
)
def test_contract(tmp_path: Path, mode: str, function: str, options: str) -> None:
    with nothing_left(tmp_path):
        check_reward(lambda: served(tmp_path, function, options, mode=mode), ANSWERS)


@MODES
def test_batches_are_whole(tmp_path: Path, mode: str) -> None:
    function = "def reward(prompts, completions): return [len(prompts) + len(c) / 100 for c in completions]"
    reward = served(tmp_path, function, ", batched=True", mode=mode)
    assert [score.value for score in reward.score(ANSWERS)] == [3.01, 3.13, 3.08]
    assert [score.value for score in reward.score(ANSWERS[:1])] == [1.01]
    reward.close()


def test_replies_do_not_wait_for_the_batch(tmp_path: Path) -> None:
    """Without `batched` the first answers have replies while a later one still takes its time."""
    function = "import time\ndef reward(p, c): return time.sleep(600) if p.startswith('Sag') else 1"
    reward = served(tmp_path, function, timeout_seconds=1.0)
    with pytest.raises(RolloutError, match="number 3 of 3"):
        reward.score(ANSWERS)


@MODES
def test_judge_weight(tmp_path: Path, mode: str) -> None:
    function = "def reward(p, c): return {'reward': True, 'judge_weight': len(c)}"
    reward = served(tmp_path, function, mode=mode, allow_judge_weight=True)
    assert reward.score(ANSWERS[:2]) == [
        Score(kind="value", value=1.0, judge_weight=1.0),
        Score(kind="value", value=1.0, judge_weight=13.0),
    ]
    reward.close()


@MODES
def test_what_is_printed_stays_off_the_protocol(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python, from C, from other processes; and none of them can read the answers away."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    function = (
        "import os, subprocess, sys\n"
        "print('at import')\n"
        "def reward(prompt, completion):\n"
        "    print('scoring', completion)\n"
        "    os.write(1, b'from below\\n')\n"
        "    subprocess.run(['sh', '-c', 'cat; echo from a child'])\n"
        "    assert sys.stdin.read() == ''\n"
        "    return 2\n"
    )
    shown: list[str] = []
    reward = served(tmp_path, function, mode=mode, show=shown.append)
    assert [score.value for score in reward.score([Answer(prompt="p", completion="x")] * 2)] == [2, 2]
    reward.close()
    assert sorted(shown) == sorted(["at import", *["scoring x", "from below", "from a child"] * 2])


@MODES
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("def reward(p, c): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def reward(p, c): return float('nan')", "ValueError: reward must be finite, got nan"),
        ("def reward(p, c): return '1'", "TypeError: reward must be a number, got '1'"),
        ("def reward(p, c): return None", "TypeError"),
        ("def reward(p, c): return {'rewrad': 1.0}", "did you mean reward?"),
    ],
)
def test_faults_end_the_run_with_the_reason(tmp_path: Path, mode: str, function: str, words: str) -> None:
    with nothing_left(tmp_path), pytest.raises(RolloutError) as caught:
        served(tmp_path, function, mode=mode).score(ANSWERS)
    assert words in str(caught.value)


def test_a_batch_of_the_wrong_length(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="returned 2 rewards for 3 answers"):
        served(tmp_path, "def reward(p, c): return [1, 2]", ", batched=True").score(ANSWERS)


def run_program(stdin: str) -> subprocess.CompletedProcess[str]:
    code = "from retrograd.reward_program import serve; serve(lambda prompt, completion: len(completion))"
    return subprocess.run(
        [sys.executable, "-c", code], input=stdin, capture_output=True, text=True, check=False, timeout=20
    )


def test_by_hand() -> None:
    """As its author tries it in a shell."""
    done = run_program('{"prompt": "p", "completion": "four"}\n{"prompt": "p", "completion": ""}\n')
    assert (done.returncode, done.stdout) == (0, '{"reward": 4.0}\n{"reward": 0.0}\n')
    assert run_program("").returncode == 0
    done = run_program('{"protocol": "retrograd-reward/2"}\n')
    assert done.returncode == 1
    assert "this program speaks retrograd-reward/1, the trainer retrograd-reward/2" in done.stderr
    handshake = '{"protocol": "retrograd-reward/1"}\n'
    cut = '{"prompt": "p", "completion": "x", "_retrograd_batch": 1, "_retrograd_index": 0}\n'
    done = run_program(handshake + cut)
    assert done.returncode == 0, "a trainer that goes away in the middle of a batch ends the program quietly"
    assert done.stdout.endswith('{"reward": 1.0, "_retrograd_batch": 1, "_retrograd_index": 0}\n')


def test_it_imports_the_standard_library_alone() -> None:
    code = (
        "import sys\n"
        "sys.path.insert(0, 'retrograd_core')\n"
        "import retrograd.reward_program\n"
        "found = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(found - set(sys.stdlib_module_names) - {'__main__'}))\n"
    )
    # -S: no installed packages, which may import more by themselves at the start.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "['retrograd']"
