"""Texts that tools give: always the same for the same bytes, and never longer than a limit."""

from __future__ import annotations

from typing import Literal

from retrograd_hookspecs import ExecResult

MAX_RESULT_BYTES = 65536
"""Most bytes of an observation, where nothing else is set."""


def cut_mark(limit: int) -> str:
    """What stands where a text was cut to `limit` bytes."""
    return f"[cut: longer than {limit} bytes]"


def cap_text(text: str, limit: int, keep: Literal["start", "ends"] = "start") -> str:
    """At most `limit` bytes of UTF-8 of a text, and a mark where it was cut: at its end, or in its middle."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= limit:
        return text
    if keep == "start":
        return f"{_whole(data[:limit])}\n{cut_mark(limit)}"
    head = limit // 2
    return f"{_whole(data[:head])}\n{cut_mark(limit)}\n{_whole(data[len(data) - (limit - head) :])}"


def command_text(result: ExecResult, limit: int = MAX_RESULT_BYTES) -> str:
    """Exit code, stdout and stderr of a command, in sections; those that are empty are left out."""
    parts = ["time limit reached: the command was stopped"] if result.timed_out else []
    if not result.timed_out:
        parts.append(f"exit code: {result.exit_code}")
    for name, stream in (("stdout", result.stdout), ("stderr", result.stderr)):
        text = stream.decode("utf-8", errors="replace").rstrip("\n")
        if text:
            parts.append(f"{name}:\n{cap_text(text, limit, 'ends')}")
    if result.truncated:
        parts.append("[output cut: longer than the sandbox keeps]")
    return "\n".join(parts)


def _whole(data: bytes) -> str:
    """Text of bytes that may begin or end inside a character."""
    return data.decode("utf-8", errors="ignore")
