"""Everything a reward program can do wrong: the run fails, says what it was, and leaves no process."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from retrograd_hookspecs import Answer, ConfigError, RolloutError
from retrograd_plugins.rewards.command import CommandConfig, CommandReward

from .support import ANSWERS, alive_in, make, nothing_left, program, wait_until

START = "handshake()\nlines, end = batch()\n"


def failure(directory: Path, body: str, answers: list[Answer] = ANSWERS, **options: object) -> str:
    """The message of the first batch that fails, of up to two; nothing of the program may be left."""
    started = time.monotonic()

    def score() -> None:
        with contextlib.closing(make(directory, body, **options)) as reward:
            reward.score(answers)
            reward.score(answers)

    with nothing_left(directory), pytest.raises(RolloutError) as caught:
        score()
    assert time.monotonic() - started < 8
    text = str(caught.value)
    assert "program.py` " in text, text
    assert sys.executable in text, text
    return text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('loading')\nhandshake()\n", ["did not echo", "strict JSON", "line: loading"]),
        ("print()\n", ["did not echo", "an empty line", "the line: (empty)"]),
        ("write({'protocol': 'retrograd-reward/2'})\n", ["did not echo", "reward/2"]),
        ("write({**read(), 'x': 1})\n", ["did not echo", '"x": 1']),
        ("write([read()])\n", ["did not echo", "not a JSON object"]),
        ("write({'reward': 1})\nread()\n", ['set reward_mode = "oneshot"']),
        ("sys.stdin.read()\n", ["did not answer in time (at its start"]),
        ("read()\n", ["ended with exit status 0", 'with reward_mode = "oneshot"']),
        ("import nonsense\n", ["exit status 1", "No module named 'nonsense'"]),
        # As in a Python that is not the one of retrograd.
        ("raise ImportError(\"No module named 'retrograd'\")\n", ["another environment", "activate"]),
        ("os.close(1)\ntime.sleep(600)\n", ["closed its standard output"]),
    ],
)  # fmt: skip
def test_before_the_first_batch(tmp_path: Path, body: str, words: list[str]) -> None:
    text = failure(tmp_path, body, timeout_seconds=1.5)
    for word in [*words, "at its start, persistent"]:
        assert word in text, text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(600)", ["did not answer in time", "number 1 of 3", "_seconds is 1.5", "flush"]),
        ("answer(lines[:1]); time.sleep(600)", ["did not answer in time", "number 2 of 3", "Name a colour."]),
        ("answer(lines); time.sleep(600)", ["did not answer in time", "all 3 answers of the batch"]),
        ("answer(lines[:2]); write(end)", ["closed the batch too early", "number 3 of 3"]),
        ("answer(lines); echo(lines[2], reward=1); write(end)", ["a reply too many", '_index": 2']),
        ("answer(lines); sys.stdout.write((json.dumps(end) + '\\n') * 2)", ["after it had closed the batch"]),
        ("answer(lines); write(end); write(end); time.sleep(600)", ["nothing asked|after it had|late"]),
        ("answer([lines[1], lines[0], lines[2]])", ["_index': 1 where 0 is due: replies come in"]),
        ("answer([lines[0], lines[0], lines[2]])", ["_index': 0 where 1 is due: a late or second"]),
        ("echo({**lines[0], '_retrograd_index': False}, reward=1)", ["'_retrograd_index': false where 0"]),
        ("echo({**lines[0], '_retrograd_index': 0.0}, reward=1)", ["'_retrograd_index': 0.0 where 0"]),
        ("echo({**lines[0], '_retrograd_batch': 7}, reward=1)", ["'_retrograd_batch': 7 where 1 is due"]),
        ("echo({**lines[0], '_retrograd_batch': '1'}, reward=1)", ["""_batch': "1" where 1 is due"""]),
        ("write({'reward': 1, '_retrograd_batch': 1})", ["without '_retrograd_index'", "reply repeats it"]),
        ("answer(lines); write({'_retrograd_batch_end': 2})", ["'_retrograd_batch_end': 2 where 1 is due"]),
        ("answer(lines); write({})", ["without '_retrograd_batch_end'"]),
        ("echo(lines[0])", ['a reply without "reward"', "number 1 of 3"]),
        ("echo(lines[0], reward=float('nan'))", ["NaN is not a number; a reward is finite", "the line: {"]),
        ("echo(lines[0], reward=float('-inf'))", ["-Infinity is not a number"]),
        ("echo(lines[0], reward=10**400)", ["'reward': 10000", "must be a finite number"]),
        ("echo(lines[0], reward=True)", ["'reward': true: it must be a finite number"]),
        ("echo(lines[0], reward='1')", ["""'reward': "1": it must be a finite number"""]),
        ("echo(lines[0], reward=None)", ["'reward': null: it must be a finite number"]),
        ("echo(lines[0], reward=[1])", ["'reward': [1]: it must be a finite number"]),
        ("echo(lines[0], rewrad=1)", ["the unknown field 'rewrad'", "hint: did you mean reward?"]),
        ("echo(lines[0], reward=1, note='x')", ["the unknown field 'note'"]),
        ("echo(lines[0], reward=1, judge_weight=1)", ['"judge_weight", but this run has no judge']),
        ("print('{\"reward\": 1, \"reward\": 2}')", ["the field 'reward' is given twice"]),
        ("print('[' * 100000)", ["not strict JSON", "more characters"]),
        ("print('ok')", ["not strict JSON", "the line: ok", "messages belong on standard error"]),
        ("sys.stdout.buffer.write(b'{\"reward\": \"\\xff\"}\\n')", ["not UTF-8 (byte 0xff at position 12)"]),
        ("print('\\x1b[31mred')", ["the line: \\x1b[31mred"]),
        ("print('x' * 9 * 2**20)", ["a line longer than 8,388,608 bytes (8 MiB)", "the line: xxxx"]),
        ("sys.stdout.write('x' * 9 * 2**20); sys.stdout.flush(); time.sleep(600)", ["8,388,608 bytes"]),
        ("answer(lines[:1]); sys.exit('gone')", ["ended with exit status 1", "number 2 of 3", "gone"]),
        ("answer(lines[:1]); os.kill(os.getpid(), 9)", ["was killed by SIGKILL", "memory runs out"]),
        ("answer(lines[:1]); os.abort()", ["was killed by SIGABRT"]),
        ("sys.stdout.write('{\"rew'); sys.stdout.flush(); os._exit(0)", ["exit status 0", 'the line: {"rew']),
    ],
)  # fmt: skip
def test_in_a_batch(tmp_path: Path, body: str, words: list[str]) -> None:
    text = failure(tmp_path, f"{START}{body}\nsys.stdout.flush(); sys.stdin.read()\n", timeout_seconds=1.5)
    for word in words:
        assert any(choice in text for choice in word.split("|")), text


def test_a_program_that_ends_between_batches(tmp_path: Path) -> None:
    text = failure(tmp_path, START + "answer(lines); write(end)\n")
    assert "in batch 2, persistent" in text
    assert "ended with exit status 0" in text or "ended before it had read everything" in text


def test_a_program_that_closes_its_input(tmp_path: Path) -> None:
    body = "handshake()\nos.close(0)\nopen('closed', 'w')\ntime.sleep(600)\n"
    reward = make(tmp_path, body)
    wait_until((tmp_path / "closed").exists)
    with nothing_left(tmp_path), pytest.raises(RolloutError, match=r"closed its standard input \(in batch 1"):
        reward.score(ANSWERS)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('{\"reward\": 1e999}')", ["'reward': Infinity: it must be a finite number"]),
        ("answer(map(json.loads, list(sys.stdin)[:2]))", ["ended with exit status 0", "number 3 of 3"]),
        ("for line in sys.stdin: write({'reward': 1}); write({'reward': 1})", ["a line too many"]),
        ("for line in sys.stdin: write({'reward': 1})\nprint()", ["a line too many", "(empty)"]),
        ("for line in sys.stdin: write({'reward': 1})\nsys.exit(3)", ["exit status 3", "all 3 answers"]),
        ("for line in sys.stdin: write({'reward': 1})\ntime.sleep(600)", ["did not answer in time", "all 3"]),
        ("handshake()", ["the unknown field 'prompt'"]),
        ("time.sleep(600)", ["did not answer in time", "number 1 of 3"]),
        ("os.close(0)\nfor n in range(3): write({'reward': 1})", ["ended before it had read everything"]),
        ("os.close(0)\ntime.sleep(600)", ["closed its standard input"]),
        ("write({'reward': 1, '_retrograd_index': 0})", ["the unknown field '_retrograd_index'"]),
    ],
)  # fmt: skip
def test_oneshot(tmp_path: Path, body: str, words: list[str]) -> None:
    answers = [*ANSWERS[:2], Answer(prompt="p", completion="x" * 500_000)]
    text = failure(tmp_path, body + "\n", answers, mode="oneshot", timeout_seconds=1.5)
    for word in [*words, "in batch 1, oneshot"]:
        assert word in text, text


def test_a_program_that_answers_what_it_has_not_read(tmp_path: Path) -> None:
    """Its numbers can be guessed; what it was sent fills the pipe."""
    body = (
        "handshake()\n"
        "echo({'_retrograd_batch': 1, '_retrograd_index': 0}, reward=1)\n"
        "write({'_retrograd_batch_end': 1})\n"
        "open('sent', 'w'); time.sleep(600)\n"
    )
    text = failure(tmp_path, body, [Answer(prompt="p", completion="x" * 2**22)])
    assert "nothing asked for, before this batch" in text or "before it had read all of it" in text
    waits = body.replace("echo(", "sys.stdin.read(1)\necho(", 1)
    text = failure(tmp_path, waits, [Answer(prompt="p", completion="x" * 2**22)])
    assert "closed the batch before it had read all of it" in text


def test_late_lines(tmp_path: Path) -> None:
    """A line that comes between two batches is found at the second one."""
    body = (
        START
        + "answer(lines); write(end); time.sleep(0.3); write(end); open('sent', 'w'); sys.stdin.read()\n"
    )
    reward = make(tmp_path, body)
    reward.score(ANSWERS)
    wait_until((tmp_path / "sent").exists)
    with (
        nothing_left(tmp_path),
        pytest.raises(RolloutError, match="a line that nothing asked for, before this"),
    ):
        reward.score(ANSWERS)


def test_a_line_after_the_last_batch_is_shown(tmp_path: Path) -> None:
    lines: list[str] = []
    body = (
        START
        + "answer(lines); write(end); time.sleep(0.3); write(end); open('sent', 'w'); sys.stdin.read()\n"
    )
    reward = make(tmp_path, body, show=lines.append)
    reward.score(ANSWERS)
    wait_until((tmp_path / "sent").exists)
    reward.close()
    assert lines == ['a line that nothing asked for, after the last batch: {"_retrograd_batch_end": 1}']


def test_no_batch_after_a_failure(tmp_path: Path) -> None:
    reward = make(tmp_path, START + "print('x')\ntime.sleep(600)\n")
    with pytest.raises(RolloutError, match="not strict JSON"):
        reward.score(ANSWERS)
    assert alive_in(tmp_path) == []
    with pytest.raises(RolloutError, match=r"it wrote a line .*; it can score no more answers"):
        reward.score(ANSWERS)
    reward.close()
    closed = make(tmp_path, "handshake()\nsys.stdin.read()\n")
    closed.close()
    with pytest.raises(RolloutError, match="it is closed; it can score no more answers"):
        closed.score(ANSWERS)


def test_a_program_that_hangs_at_its_end_is_killed(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nhandshake()\nsys.stdin.read()\ntime.sleep(600)\n"
    reward = make(tmp_path, body, grace_seconds=0.5)
    started = time.monotonic()
    with nothing_left(tmp_path):
        reward.close()
    assert 0.4 < time.monotonic() - started < 3


CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
"""A child of the program that holds all its pipes."""


@pytest.mark.parametrize("mode", ["persistent", "oneshot"])
def test_a_grandchild_that_keeps_the_pipes(tmp_path: Path, mode: str) -> None:
    """It ends with the program, and does not hide the program's death."""
    if mode == "oneshot":
        reward = make(tmp_path, CHILD + "answer(map(json.loads, sys.stdin))\n", mode=mode)
        with nothing_left(tmp_path):
            assert [score.value for score in reward.score(ANSWERS)] == [1, 13, 8]
        return
    assert "exit status 7" in failure(tmp_path, START + CHILD + "answer(lines[:1]); os._exit(7)\n")
    reward = make(tmp_path, CHILD + "handshake()\nsys.stdin.read()\n", grace_seconds=10.0)
    assert len(alive_in(tmp_path)) == 2
    started = time.monotonic()
    with nothing_left(tmp_path):
        reward.close()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("mode", ["persistent", "oneshot"])
def test_a_process_that_left_the_group_holds_nothing_up(tmp_path: Path, mode: str) -> None:
    """Such a process is beyond reach; it may not make the run wait."""
    escaped = CHILD.replace("600", "8").replace("])", "], start_new_session=True)")
    started = time.monotonic()
    text = failure_of_escaped(tmp_path, f"{escaped}sys.stderr.write('why\\n')\nos._exit(7)\n", mode)
    assert "exit status 7" in text
    assert "why" in text
    assert time.monotonic() - started < 4
    for process in alive_in(tmp_path):
        process.kill()


def failure_of_escaped(directory: Path, body: str, mode: str) -> str:
    with pytest.raises(RolloutError) as caught:
        make(directory, body, mode=mode).score(ANSWERS)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["persistent", "oneshot"])
def test_megabytes_of_stderr(tmp_path: Path, mode: str) -> None:
    """All are shown, the last lines are part of the error, and nothing is held up."""
    shown: list[str] = []
    noise = "for n in range(40000): sys.stderr.write(f'{n} ' + 'e' * 90 + '\\n')\nsys.stderr.flush()\n"
    body = (
        f"{noise}sys.exit(3)\n" if mode == "oneshot" else f"handshake()\n{noise}print('x'); time.sleep(600)\n"
    )
    text = failure(tmp_path, body, mode=mode, show=shown.append)
    assert [line.split()[0] for line in shown] == [str(n) for n in range(40000)]
    assert "its stderr (the last 20 of 40,000 lines):\n    39980 eee" in text
    assert "\n    39999 eee" in text
    assert len(text) < 5000


def test_stderr_without_line_ends(tmp_path: Path) -> None:
    shown: list[str] = []
    text = failure(tmp_path, "sys.stderr.write('e' * 10**6); sys.exit(1)\n", show=shown.append)
    assert sum(map(len, shown)) == 10**6
    assert max(map(len, shown)) <= 16384
    assert "more characters" in text
    assert len(text) < 10_000


def test_stderr_that_is_not_text(tmp_path: Path) -> None:
    text = failure(tmp_path, "sys.stderr.buffer.write(b'\\xff\\xfe no\\n'); sys.exit(1)\n")
    assert "\ufffd\ufffd no" in text


def test_our_stderr_may_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stderr", nowhere)
    reward = make(
        tmp_path, "sys.stderr.write('hello\\n')\nanswer(map(json.loads, sys.stdin))\n", mode="oneshot"
    )
    assert len(reward.score(ANSWERS)) == 3


def test_a_flood_on_stderr_does_not_stop_the_clock(tmp_path: Path) -> None:
    body = START + "while True: sys.stderr.write('e' * 100 + '\\n')\n"
    text = failure(tmp_path, body, timeout_seconds=1.0, show=lambda line: None)
    assert "did not answer in time" in text


def test_an_answer_too_long_to_send(tmp_path: Path) -> None:
    answers = [*ANSWERS[:1], Answer(prompt="p", completion="x" * 2**23), *ANSWERS[2:]]
    for mode in ("persistent", "oneshot"):
        text = failure(
            tmp_path, START + "sys.stdin.read()\n" if mode == "persistent" else "", answers, mode=mode
        )
        assert "cannot be sent a line of 8,388," in text
        assert "number 2 of 3" in text


def test_wrong_judge_weights(tmp_path: Path) -> None:
    for weight in ("-0.5", "True", "'1'", "None"):
        body = f"write({{'reward': 1, 'judge_weight': {weight}}})\nsys.stdin.read()\n"
        text = failure(tmp_path, body, mode="oneshot", allow_judge_weight=True)
        assert "judge_weight" in text
        assert "at least 0" in text or "must be a finite number" in text


def test_programs_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print()")
    (tmp_path / "text").write_text("no shebang\n")
    (tmp_path / "lost").write_text("#!/no/such/interpreter\n")
    for name in ("text", "lost"):
        (tmp_path / name).chmod(0o755)

    def refusal(*command: str, mode: str = "persistent") -> str:
        with pytest.raises(ConfigError) as caught:
            CommandReward(CommandConfig(command=command, mode=mode), tmp_path).score(ANSWERS)  # type: ignore[arg-type]
        text = str(caught.value)
        assert "reward_command: " in text
        return text

    assert "no program 'no-such-program' is on PATH" in refusal("no-such-program")
    assert f"there is no file {tmp_path / 'no.py'}" in refusal("./no.py")
    assert f"{tmp_path / 'plain.py'} is not executable (`chmod +x" in refusal("./plain.py")
    assert 'a file of the TOML\'s directory is "./plain.py"' in refusal("plain.py")
    assert f"{tmp_path} is a directory" in refusal("./")
    assert 'one item an argument, ["python", "reward.py"]' in refusal("python reward.py")
    assert "~ is not expanded" in refusal("~/reward.py")
    for mode in ("persistent", "oneshot"):
        assert "is neither a program nor a script (a script begins" in refusal("./text", mode=mode)
        assert "the interpreter in the first line of" in refusal("./lost", mode=mode)


def test_the_message_as_a_whole(tmp_path: Path) -> None:
    command = program(
        tmp_path,
        START + "sys.stderr.write('half way\\n')\nanswer(lines[:1])\nprint('oops'); time.sleep(600)\n",
    )
    reward = CommandReward(CommandConfig(command=command), tmp_path, show=lambda line: None)
    with pytest.raises(RolloutError) as caught:
        reward.score(ANSWERS)
    assert str(caught.value).splitlines() == [
        f"reward program `{sys.executable} program.py` wrote a line that is not strict JSON"
        " (Expecting value: line 1 column 1 (char 0)) (in batch 1, persistent)",
        "  the line: oops",
        '  the answer, number 2 of 3: prompt "Name a colour.", completion "a\\nlong\\nanswer"',
        "  hint: its standard output is for replies alone; messages belong on standard error",
        "  its stderr (all):",
        "    half way",
    ]
