"""Reward programs that work: what they are sent, what their replies become, how they end."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from retrograd.testing.rewards import check_reward
from retrograd_hookspecs import Answer, BuildContext, ConfigError, Score
from retrograd_plugins.rewards.command import CommandConfig, CommandReward, retrograd_rewards

from .support import ANSWERS, PRELUDE, alive_in, make, nothing_left, program, wait_until

ROUND = "handshake()\nwhile True:\n    lines, end = batch()\n    answer(lines)\n    write(end)\n"
ONESHOT = "answer(map(json.loads, sys.stdin))\n"


def values(scores: object) -> list[float]:
    assert isinstance(scores, list)
    assert all(score.kind == "value" and score.explanation == "" for score in scores)
    return [score.value for score in scores]


def seen(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "seen.jsonl").read_text().split("\n") if line]


@pytest.mark.parametrize(("mode", "body"), [("persistent", ROUND), ("oneshot", ONESHOT)])
def test_contract(tmp_path: Path, mode: str, body: str) -> None:
    with nothing_left(tmp_path):
        check_reward(lambda: make(tmp_path, body, mode=mode), ANSWERS)


def test_what_a_persistent_program_is_sent(tmp_path: Path) -> None:
    body = (
        "log = open('seen.jsonl', 'a')\n"
        "for line in sys.stdin:\n"
        "    log.write(line); log.flush()\n"
        "    line = json.loads(line)\n"
        "    if 'prompt' in line: answer([line])\n"
        "    else: write(line)\n"
    )
    with nothing_left(tmp_path):
        reward = make(tmp_path, body)
        assert values(reward.score(ANSWERS)) == [1, 13, 8]
        assert values(reward.score(ANSWERS[:1])) == [1]
        assert reward.score([]) == []
        reward.close()
    assert seen(tmp_path) == [
        {"protocol": "retrograd-reward/1"},
        *(
            {"prompt": a.prompt, "completion": a.completion, "_retrograd_batch": 1, "_retrograd_index": index}
            for index, a in enumerate(ANSWERS)
        ),
        {"_retrograd_batch_end": 1},
        {"prompt": "What is 2 + 2?", "completion": "4", "_retrograd_batch": 2, "_retrograd_index": 0},
        {"_retrograd_batch_end": 2},
    ]
    raw = (tmp_path / "seen.jsonl").read_text(encoding="utf-8")
    assert "héllo 日本" in raw, "UTF-8 is sent as it is"


def test_what_a_oneshot_program_is_sent(tmp_path: Path) -> None:
    body = (
        "with open('seen.jsonl', 'a') as log:\n"
        "    text = sys.stdin.read()\n"
        "    log.write(text)\n"
        "    log.write(json.dumps(os.getpid()) + '\\n')\n"
        "answer(map(json.loads, text.splitlines()))\n"
    )
    with nothing_left(tmp_path):
        reward = make(tmp_path, body, mode="oneshot")
        assert alive_in(tmp_path) == [], "nothing runs between batches"
        assert values(reward.score(ANSWERS)) == [1, 13, 8]
        assert values(reward.score(ANSWERS[:1])) == [1]
        assert reward.score([]) == []
        reward.close()
    *first, pid, second, other = seen(tmp_path)
    assert first == [{"prompt": a.prompt, "completion": a.completion} for a in ANSWERS]
    assert second == first[0]
    assert pid != other, "one process a batch"


@pytest.mark.parametrize("mode", ["persistent", "oneshot"])
def test_line_separators_stay_inside_a_line(tmp_path: Path, mode: str) -> None:
    """`str.splitlines` and Node's readline end lines at characters that JSON leaves as they are."""
    text = "a\x85b\u2028c\u2029d\ne\rf"
    body = (
        "text = sys.stdin.read()\n"
        f"assert len(text.splitlines()) == 1 and json.loads(text)['completion'] == {text!r}\n"
        "write({'reward': 1})\n"
    )
    if mode == "persistent":
        body = (
            "handshake()\nline = sys.stdin.readline()\n"
            f"assert len(line.splitlines()) == 1 and json.loads(line)['completion'] == {text!r}\n"
            "echo(json.loads(line), reward=1)\nwrite(read())\nsys.stdin.read()\n"
        )
    reward = make(tmp_path, body, mode=mode)
    assert values(reward.score([Answer(prompt="p", completion=text)])) == [1]
    reward.close()


def test_large_batches_do_not_deadlock(tmp_path: Path) -> None:
    """Far more than pipes hold, in all three; the program answers each line at once, or all at the end."""
    answers = [Answer(prompt="p" * 4000, completion="x" * (n % 7)) for n in range(4000)]
    expected = [n % 7 for n in range(4000)]
    at_once = (
        "handshake()\nwhile True:\n"
        "    line = read()\n"
        "    echo(line, **({'reward': len(line['completion'])} if 'prompt' in line else {}))\n"
        "    sys.stderr.write('e' * 400 + '\\n')\n"
    )
    for body in (ROUND, at_once):
        reward = make(tmp_path, body, show=lambda line: None)
        assert values(reward.score(answers)) == expected
        reward.close()


def test_a_line_of_just_8_mib(tmp_path: Path) -> None:
    size = 8 * 1024 * 1024
    line = len('{"prompt": "", "completion": ""}')
    reply = (
        "text = json.dumps({'reward': len(read()['completion'])})\n"
        "print(text + ' ' * (8 * 2**20 - len(text)))\n"
    )
    reward = make(tmp_path, reply, mode="oneshot")
    answers = [Answer(prompt="", completion="x" * (size - line))]
    assert values(reward.score(answers)) == [size - line]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1.0), ("-0.5", -0.5), ("1e-320", 1e-320), ("12345678901234567890", 1.2345678901234567e19)],
)
def test_numbers(tmp_path: Path, text: str, value: float) -> None:
    reward = make(tmp_path, f"""print('{{"reward": {text}}}')\n""", mode="oneshot")
    assert reward.score(ANSWERS[:1]) == [Score(kind="value", value=value)]


def test_judge_weight(tmp_path: Path) -> None:
    body = "for weight in (0, 0.5, 2): write({'reward': 1, 'judge_weight': weight})\n"
    reward = make(tmp_path, body, mode="oneshot", allow_judge_weight=True)
    assert [score.judge_weight for score in reward.score(ANSWERS)] == [0.0, 0.5, 2.0]
    plain = make(tmp_path, ONESHOT, mode="oneshot", allow_judge_weight=True)
    assert [score.judge_weight for score in plain.score(ANSWERS)] == [None] * 3


def test_a_last_line_without_newline(tmp_path: Path) -> None:
    reward = make(tmp_path, "sys.stdout.write('{\"reward\": 3}')\n", mode="oneshot")
    assert values(reward.score(ANSWERS[:1])) == [3]


def test_windows_line_ends(tmp_path: Path) -> None:
    reward = make(tmp_path, "sys.stdout.write('{\"reward\": 3}\\r\\n')\n", mode="oneshot")
    assert values(reward.score(ANSWERS[:1])) == [3]


def test_stderr_is_shown_line_by_line(tmp_path: Path) -> None:
    lines: list[str] = []
    body = "sys.stderr.write('lädt\\nfertig\\nohne Ende'); sys.stderr.flush()\n" + ROUND
    reward = make(tmp_path, body, show=lines.append)
    assert values(reward.score(ANSWERS[:1])) == [1]
    reward.close()
    assert lines == ["lädt", "fertig", "ohne Ende"]


def test_stderr_is_shown_on_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "sys.stderr.write('hello\\n')\n" + ONESHOT, mode="oneshot").score(ANSWERS)
    captured = capsys.readouterr()
    assert captured.err == "reward program: hello\n"
    assert captured.out == ""


def test_a_program_that_ends_by_itself_has_time_for_it(tmp_path: Path) -> None:
    body = (
        "import threading\nhandshake()\nlines, end = batch(); answer(lines); write(end)\n"
        "assert sys.stdin.read() == ''\ntime.sleep(0.3)\nopen('saved', 'w').close()\n"
    )
    with nothing_left(tmp_path):
        reward = make(tmp_path, body, grace_seconds=10.0)
        reward.score(ANSWERS)
        started = time.monotonic()
        reward.close()
        assert time.monotonic() - started < 5, "the grace period is not waited out"
        reward.close()
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("kind", ["path", "relative", "on PATH", "parent"])
def test_programs_are_found_as_a_shell_finds_them(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    folder = {"path": tmp_path, "relative": run, "on PATH": tmp_path / "bin", "parent": tmp_path}[kind]
    folder.mkdir(exist_ok=True)
    path = folder / "my reward"
    path.write_text(f"#!{sys.executable}\n{PRELUDE}assert sys.argv[1:] == ['$HOME', '*', 'a b']\n{ONESHOT}")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    name = {"path": str(path), "relative": "./my reward", "on PATH": "my reward", "parent": "../my reward"}[
        kind
    ]
    reward = CommandReward(CommandConfig(command=(name, "$HOME", "*", "a b"), mode="oneshot"), run)
    assert values(reward.score(ANSWERS)) == [1, 13, 8]


def test_component(tmp_path: Path) -> None:
    [component] = retrograd_rewards()
    config = component.config(command=program(tmp_path, ROUND), timeout_seconds=20.0)
    assert (config.mode, config.allow_judge_weight) == ("persistent", False)
    reward = component.build(config, BuildContext(config=None, base_dir=tmp_path))
    assert values(reward.score(ANSWERS)) == [1, 13, 8]
    reward.close()
    with pytest.raises(ConfigError, match="names no program"):
        component.build(component.config(command=()), BuildContext(config=None, base_dir=tmp_path))


@pytest.mark.parametrize(
    "ending", ["raise SystemExit(3)", "1 / 0", "del reward", "os._exit(0)", "os.kill(os.getpid(), 15)"]
)
def test_nothing_is_left_when_the_trainer_ends(tmp_path: Path, ending: str) -> None:
    """However the interpreter ends; after `os._exit` and a signal the closed input ends the program."""
    stubborn = "" if "os." in ending else "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    stay = "" if "os." in ending else "time.sleep(600)\n"
    command = program(
        tmp_path,
        f"{stubborn}handshake()\nlines, end = batch(); answer(lines); write(end)\nsys.stdin.read()\n{stay}",
    )
    code = (
        "import os\nfrom pathlib import Path\n"
        "from retrograd_hookspecs import Answer\n"
        "from retrograd_plugins.rewards.command import CommandConfig, CommandReward\n"
        f"reward = CommandReward(CommandConfig(command={command!r}), Path({str(tmp_path)!r}))\n"
        "print(reward.score([Answer(prompt='p', completion='four')])[0].value, flush=True)\n"
        f"{ending}\n"
    )
    with nothing_left(tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20
        )
        assert done.stdout == "4.0\n", done.stderr


def test_a_forgotten_reward_takes_its_program_with_it(tmp_path: Path) -> None:
    reward = make(tmp_path, "handshake()\ntime.sleep(600)\n")
    assert len(alive_in(tmp_path)) == 1
    del reward
    wait_until(lambda: not alive_in(tmp_path))


def test_an_interrupted_batch_ends_the_program(tmp_path: Path) -> None:
    code = (
        "import os, signal, threading\nfrom pathlib import Path\n"
        "from retrograd_hookspecs import Answer\n"
        "from retrograd_plugins.rewards.command import CommandConfig, CommandReward\n"
        f"command = {program(tmp_path, 'handshake()' + chr(10) + 'time.sleep(600)' + chr(10))!r}\n"
        f"reward = CommandReward(CommandConfig(command=command), Path({str(tmp_path)!r}))\n"
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n    reward.score([Answer(prompt='p', completion='four')])\n"
        "except KeyboardInterrupt:\n    pass\n"
        "try:\n    reward.score([Answer(prompt='p', completion='four')])\n"
        "except Exception as error:\n    print(error)\n"
    )
    with nothing_left(tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20
        )
    assert "it was interrupted; it can score no more answers" in done.stdout


@pytest.mark.parametrize("mode", ["persistent", "oneshot"])
def test_no_file_descriptor_is_left(tmp_path: Path, mode: str) -> None:
    def life() -> None:
        reward = make(tmp_path, ROUND if mode == "persistent" else ONESHOT, mode=mode)
        reward.score(ANSWERS)
        reward.close()

    life()
    gc.collect()  # what other tests left
    before = psutil.Process().num_fds()
    for _ in range(5):
        life()
    assert psutil.Process().num_fds() == before
