"""The judge `command`: one program, one group at a time."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrograd.line_process import FaultError, LineProcess, shorten
from retrograd_hookspecs import JudgeGroup, JudgeMember, Message, Score

from .command import CommandJudge

GRACE_SECONDS = 5.0
"""How long the program may take to end after its stdin is closed."""


class JudgeProgram:
    """Keeps the program and asks it about one group after another."""

    def __init__(self, config: CommandJudge, executable: str, directory: Path) -> None:
        from anyio.lowlevel import RunVar

        self._config = config
        self._executable = executable
        self._directory = directory
        self._process: LineProcess | None = None
        self._turn: RunVar[Any] = RunVar("turn")
        self._closed = False
        self._waiting = False
        self._interrupted = False
        self._counts: dict[str, float] = {}

    async def score(self, group: JudgeGroup) -> Sequence[Score]:
        """One score per member, or one error for all. See `retrograd_hookspecs.Judge`."""
        import anyio.to_thread

        if not group.members:
            return []
        turn = self._turn.get(None)
        if turn is None:
            turn = anyio.Lock()
            self._turn.set(turn)
        async with turn, anyio.create_task_group() as tasks:
            self._waiting, self._interrupted = True, False
            tasks.start_soon(self._end_if_cancelled)
            # Waiting for a program would hold up the event loop, so a thread waits. It is not left behind.
            with anyio.CancelScope(shield=True):
                scores = await anyio.to_thread.run_sync(self._score, group)
                self._waiting = False
            tasks.cancel_scope.cancel()
        return scores

    def metrics(self) -> Mapping[str, float]:
        """Since the last call: requests (groups sent), failures (groups without a verdict), restarts (the
        program was killed for a fault), seconds."""
        taken = {"requests": 0.0, "failures": 0.0, "restarts": 0.0, "seconds": 0.0} | self._counts
        self._counts = {}
        return taken

    async def close(self) -> None:
        """Close the program's stdin, wait, and kill what is left of it; may be called more than once."""
        import anyio.to_thread

        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            await anyio.to_thread.run_sync(process.close, GRACE_SECONDS)

    async def _end_if_cancelled(self) -> None:
        """End the program where the verdict is no longer awaited, and so the thread that waits for it."""
        import anyio

        try:
            await anyio.sleep_forever()
        finally:
            if self._waiting:
                self._interrupted = True
                if (process := self._process) is not None:
                    process.end()

    def _score(self, group: JudgeGroup) -> list[Score]:
        began = time.monotonic()
        try:
            return self._exchange(group)
        except (FaultError, OSError) as error:
            self._count("failures")
            reason = self._reason(error)
            return [Score(kind="error", explanation=reason) for _ in group.members]
        finally:
            self._count("seconds", time.monotonic() - began)

    def _exchange(self, group: JudgeGroup) -> list[Score]:
        """Ask about a group. Raises `FaultError` or OSError, after which the process is not used again."""
        if self._closed:
            raise FaultError("is closed")
        try:
            payload = json.dumps(as_record(group), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise FaultError(f"cannot be sent the group: {error}") from error
        data = payload.encode("utf-8", "backslashreplace") + b"\n"
        process = self._running()
        deadline = time.monotonic() + self._config.timeout_secs
        self._count("requests")
        lines = process.lines(data, deadline)
        scores = read_scores(_first(lines), group)
        # Not a byte more is due, so that the next group cannot be given the rest of this one's answer.
        if process.unsent:
            raise FaultError("answered before it had read the group")
        if extra := process.unread():
            raise FaultError("wrote more than one line for a group", extra)
        return scores

    def _running(self) -> LineProcess:
        process = self._process
        if process is not None and (extra := process.unread()):
            self._drop()
            raise FaultError("wrote a line that no group asked for", extra)
        if process is None:
            process = LineProcess(
                self._config.command,
                executable=self._executable,
                directory=self._directory,
                show=_show,
            )
            self._process = process
            if self._interrupted:  # before there was a process to end
                process.end()
        return process

    def _reason(self, error: FaultError | OSError) -> str:
        """What happened, for the scores; the process is killed, and its stderr is part of it."""
        process = self._drop()
        what = error.what if isinstance(error, FaultError) else f"cannot be run: {error}"
        line = error.line if isinstance(error, FaultError) else None
        parts = [f"the judge program {self._config.command[0]} {what}"]
        if line:
            parts.append(f"the line: {shorten(line.decode('utf-8', 'replace'))}")
        if process is not None and (text := process.stderr_text()):
            parts.append(text)
        return "; ".join(parts)

    def _drop(self) -> LineProcess | None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._count("restarts")
        return process

    def _count(self, name: str, value: float = 1.0) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + value


def as_record(group: JudgeGroup) -> dict[str, Any]:
    """A group as the program reads it."""
    return {
        "group": group.id,
        "rubric": group.rubric,
        "opening": [_message(message) for message in group.opening],
        "members": [_member(index, member) for index, member in enumerate(group.members)],
    }


def _member(index: int, member: JudgeMember) -> dict[str, Any]:
    messages = [_message(message) for message in member.messages]
    return {"id": index, "messages": messages, "final_state": member.final_state}


def _message(message: Message) -> dict[str, Any]:
    """A message with the keys of a chat record; those that say nothing are left out."""
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": dict(call.arguments)}
            for call in message.tool_calls
        ]
    optional = ("tool_call_id", "name", "is_error", "raw")
    return record | {name: value for name in optional if (value := getattr(message, name))}


def read_scores(line: bytes, group: JudgeGroup) -> list[Score]:
    """The scores of a group in the order of its members. Raises `FaultError` for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise FaultError("did not write a JSON object", line) from None
    if not isinstance(value, dict) or set(value) != {"group", "scores"}:
        raise FaultError('did not write {"group": …, "scores": […]}', line)
    if value["group"] != group.id:
        raise FaultError(f"answered for group {value['group']!r}, not for {group.id!r}", line)
    if not isinstance(value["scores"], list):
        raise FaultError("did not write an array of scores", line)
    found: dict[int, Score] = {}
    for entry in value["scores"]:
        index, score = _entry(entry, line)
        if not 0 <= index < len(group.members):
            raise FaultError(f"scored a member {index}, which is not in the group", line)
        if index in found:
            raise FaultError(f"scored member {index} twice", line)
        found[index] = score
    missing = [str(index) for index in range(len(group.members)) if index not in found]
    if missing:
        raise FaultError(f"did not score every member; missing: {', '.join(missing)}", line)
    return [found[index] for index in range(len(group.members))]


def _entry(entry: Any, line: bytes) -> tuple[int, Score]:
    if not isinstance(entry, dict) or not {"id", "score"} <= set(entry) <= {"id", "score", "explanation"}:
        raise FaultError('did not write scores as {"id": …, "score": …, "explanation": …}', line)
    index, score, explanation = entry["id"], entry["score"], entry.get("explanation", "")
    if type(index) is not int:
        raise FaultError("wrote an id that is no integer", line)
    if type(score) not in (int, float) or not math.isfinite(score) or not 0 <= score <= 1:
        raise FaultError(f"wrote a score for member {index} that is no number from 0 to 1", line)
    if not isinstance(explanation, str):
        raise FaultError(f"wrote an explanation for member {index} that is no string", line)
    return index, Score(kind="value", value=float(score), explanation=explanation)


def _show(line: str) -> None:
    # A terminal that has gone away must not end the run.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"judge program: {line}\n")
        sys.stderr.flush()


def _first(lines: Iterator[bytes]) -> bytes:
    with contextlib.closing(lines) as open_lines:  # type: ignore[type-var]
        return next(open_lines)
