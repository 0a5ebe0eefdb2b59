"""A program that scores answers, over JSON lines on its standard input and output::

    [grpo]
    reward_command = ["python", "reward.py"]
    reward_mode = "persistent"
    reward_timeout_seconds = 300

The program is run directly, without a shell, in the directory of the TOML. A name without a slash is looked
up on PATH; a path is relative to that directory. `docs/rewards.md` has the protocol. `persistent` starts the
program when the reward is built, so that one that cannot start fails before the first rollout; it serves
all batches. `oneshot` starts it once a batch.

Any fault of the program ends the run with a `RolloutError`: a line that is not exactly what is due, silence
until the deadline, an early end. There is no restart, since a program that failed may have lost its state.
Its stderr is shown line by line on ours; the last lines are part of the error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from retrograd.line_process import EndedError, FaultError, LateError, LineProcess, shorten
from retrograd_hookspecs import (
    Answer,
    BuildContext,
    Component,
    ConfigError,
    Problem,
    Reward,
    RolloutError,
    Score,
    hookimpl,
    key,
)

from ._protocol import (
    BATCH,
    BATCH_END,
    INDEX,
    PROTOCOL,
    check_batch_end,
    check_handshake,
    encode,
    read_reply,
    request,
)

GRACE_SECONDS = 5.0
"""Time that a program has to end after its input was closed."""


@attrs.frozen(kw_only=True)
class CommandConfig:
    """What an algorithm passes on from its own table."""

    command: tuple[str, ...] = key(doc="Reward program, as an argument list.")
    mode: Literal["persistent", "oneshot"] = key(
        "persistent", doc="One process for the run, or one process a batch."
    )
    timeout_seconds: float = key(300.0, above=0.0, unit="s", doc="Deadline for one batch of rewards.")
    allow_judge_weight: bool = key(False, doc="Replies may carry judge_weight.")


class CommandReward:
    """Scores answers with a program.

    Raises `ConfigError` where the program cannot be started, `RolloutError` where it does not echo the
    first line (mode "persistent").
    """

    def __init__(
        self,
        config: CommandConfig,
        directory: Path,
        *,
        grace_seconds: float = GRACE_SECONDS,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._grace_seconds = grace_seconds
        self._show = show or _show
        self._executable = find_program(config.command, directory)
        self._batch = 0
        self._ended = ""
        self._process: LineProcess | None = None
        if config.mode == "persistent":
            self._process = self._start()
            self._handshake(self._process)

    def score(self, answers: Sequence[Answer]) -> Sequence[Score]:
        """One score per answer, of kind "value". Raises `RolloutError` for any fault of the program."""
        if self._ended:
            raise RolloutError(f"reward program `{self._name}`: {self._ended}; it can score no more answers")
        if not answers:
            return []
        self._batch += 1
        deadline = time.monotonic() + self._config.timeout_seconds
        process = self._process or self._start()
        scores: list[Score] = []
        try:
            if self._process is not None:
                self._persistent(process, answers, deadline, scores)
            else:
                self._oneshot(process, answers, deadline, scores)
                process.kill()
        except FaultError as fault:
            raise self._failure(process, fault, answers, len(scores)) from None
        except BaseException:
            self._end(process, "it was interrupted")
            raise
        return scores

    def close(self) -> None:
        """Close the program's input, wait a little for its end, then kill its process group."""
        process, self._process = self._process, None
        if process is None:
            self._ended = self._ended or "it is closed"
            return
        with contextlib.suppress(FaultError):
            line = process.unread()
            if line and not self._ended:
                self._show(f"a line that nothing asked for, after the last batch: {_text(line)}")
        process.close(self._grace_seconds)
        self._ended = self._ended or "it is closed"

    def _persistent(
        self, process: LineProcess, answers: Sequence[Answer], deadline: float, scores: list[Score]
    ) -> None:
        if line := process.unread():
            raise FaultError("wrote a line that nothing asked for, before this batch", line)
        echoes = [{BATCH: self._batch, INDEX: index} for index in range(len(answers))]
        payload = _requests(answers, echoes) + encode({BATCH_END: self._batch})
        lines = process.lines(payload, deadline)
        for echo in echoes:
            scores.append(self._read(next(lines), echo))
        check_batch_end(next(lines), self._batch)
        if process.unsent:
            raise FaultError("closed the batch before it had read all of it")
        if line := process.unread():
            raise FaultError("wrote a line after it had closed the batch", line)

    def _oneshot(
        self, process: LineProcess, answers: Sequence[Answer], deadline: float, scores: list[Score]
    ) -> None:
        lines = process.lines(_requests(answers, [{}] * len(answers)), deadline, last=True)
        for _ in answers:
            scores.append(self._read(next(lines), {}))
        try:
            raise FaultError("wrote a line too many", next(lines))
        except EndedError as end:
            if end.status != 0:
                raise

    def _read(self, line: bytes, echoes: Mapping[str, int]) -> Score:
        return read_reply(line, echoes, judge_weight=self._config.allow_judge_weight)

    def _start(self) -> LineProcess:
        try:
            return LineProcess(
                self._config.command, executable=self._executable, directory=self._directory, show=self._show
            )
        except (OSError, ValueError) as error:
            raise _refused(*_why_not_started(error, self._executable, self._directory)) from error

    def _handshake(self, process: LineProcess) -> None:
        deadline = time.monotonic() + self._config.timeout_seconds
        try:
            check_handshake(next(process.lines(encode({"protocol": PROTOCOL}), deadline)))
        except FaultError as fault:
            if isinstance(fault, EndedError) and fault.status == 0:
                fault.hint = 'a program that ends after its input is run with reward_mode = "oneshot"'
            raise self._failure(process, fault, (), 0) from None
        except BaseException:
            self._end(process, "it was interrupted")
            raise

    @property
    def _name(self) -> str:
        return shorten(shlex.join(self._config.command))

    def _end(self, process: LineProcess, why: str) -> None:
        self._ended = why
        process.kill()

    def _failure(
        self, process: LineProcess, fault: FaultError, answers: Sequence[Answer], scored: int
    ) -> RolloutError:
        """Kill the program and say what it did, on which answer, and what it wrote to stderr."""
        self._end(process, f"it {fault.what}")
        when = f"in batch {self._batch}" if answers else "at its start"
        lines = [f"reward program `{self._name}` {fault.what} ({when}, {self._config.mode})"]
        if fault.line is not None:
            lines.append(f"the line: {_text(fault.line)}")
        index = scored if fault.answer is None else fault.answer
        if index < len(answers):
            answer = answers[index]
            lines.append(
                f"the answer, number {index + 1} of {len(answers)}: prompt {_quote(answer.prompt)},"
                f" completion {_quote(answer.completion)}"
            )
        elif answers:
            lines.append(f"all {len(answers)} answers of the batch had a reply")
        written = process.stderr_text()
        if hint := fault.hint or self._timeout_hint(fault) or self._python_hint(written):
            lines.append(f"hint: {hint}")
        lines.append(written or "it wrote nothing to stderr")
        return RolloutError("\n  ".join(lines))

    def _python_hint(self, written: str) -> str:
        if "No module named 'retrograd'" not in written:
            return ""
        return (
            f"{self._executable} belongs to another environment than retrograd: activate that one first, or"
            f" name its Python in the command, {sys.executable}"
        )

    def _timeout_hint(self, fault: FaultError) -> str:
        if not isinstance(fault, LateError):
            return ""
        return (
            f"reward_timeout_seconds is {self._config.timeout_seconds:g};"
            " does the program flush its output after every line?"
        )


def _requests(answers: Sequence[Answer], echoes: Sequence[Mapping[str, int]]) -> bytes:
    lines = []
    for index, (answer, echo) in enumerate(zip(answers, echoes, strict=True)):
        try:
            lines.append(request(answer, echo))
        except FaultError as fault:
            fault.answer = index
            raise
    return b"".join(lines)


def find_program(command: Sequence[str], directory: Path) -> str:
    """The file that a command runs, as a shell in `directory` would find it. Raises `ConfigError`."""
    if not command or not command[0]:
        raise _refused("names no program", 'write a list such as ["python", "reward.py"]')
    program = command[0]
    if "/" in program:
        path = directory / program
        if not path.exists():
            raise _refused(f"there is no file {path}", _spelling_hint(program, directory))
        if path.is_dir() or not os.access(path, os.X_OK):
            kind = "a directory" if path.is_dir() else "not executable"
            raise _refused(f"{path} is {kind}", f'`chmod +x {path}`, or ["python", {json.dumps(program)}]')
        return os.path.abspath(path)
    found = shutil.which(program)
    if found is None:
        raise _refused(f"no program {program!r} is on PATH", _spelling_hint(program, directory))
    return os.path.abspath(found)


def _spelling_hint(program: str, directory: Path) -> str:
    if program.startswith("~"):
        return "no shell is involved, so ~ is not expanded"
    if "/" not in program and (directory / program).exists():
        return f'a file of the TOML\'s directory is "./{program}"'
    if " " in program:
        words = ", ".join(json.dumps(word) for word in program.split())
        return f"no shell is involved: one item an argument, [{words}]"
    return ""


def _why_not_started(error: Exception, executable: str, directory: Path) -> tuple[str, str]:
    """What kept a program from starting, and how to mend it."""
    number = error.errno if isinstance(error, OSError) else None
    if not directory.is_dir():
        return f"{executable} cannot run in {directory}", "the directory is gone"
    if number == errno.ENOEXEC:
        return (
            f"{executable} is neither a program nor a script",
            "a script begins with a line such as #!/bin/sh",
        )
    if number == errno.ENOENT and os.path.exists(executable):
        return f"the interpreter in the first line of {executable} does not exist", ""
    return f"{executable} cannot be started: {error}", ""


def _refused(message: str, hint: str) -> ConfigError:
    return ConfigError([Problem(where="configuration", key="reward_command", message=message, hint=hint)])


def _quote(text: str) -> str:
    return json.dumps(shorten(text, 120), ensure_ascii=False)


def _text(line: bytes) -> str:
    """A line as a message shows it; what is not printable is escaped."""
    text = shorten(line.decode("utf-8", "backslashreplace"))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) or "(empty)"


def _show(line: str) -> None:
    # A terminal that has gone away must not end the run.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"reward program: {line}\n")
        sys.stderr.flush()


def _build(config: CommandConfig, context: BuildContext) -> Reward:
    return CommandReward(config, context.base_dir)


@hookimpl
def retrograd_rewards() -> list[Component[Any, Reward]]:
    """`command`."""
    return [
        Component(
            name="command",
            config=CommandConfig,
            build=_build,
            summary="A program that scores answers over JSON lines.",
        )
    ]
