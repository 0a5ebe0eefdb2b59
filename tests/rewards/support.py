"""Reward programs written for one test, and what is left of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from retrograd_hookspecs import Answer
from retrograd_plugins.rewards.command import CommandConfig, CommandReward

ANSWERS = [
    Answer(prompt="What is 2 + 2?", completion="4"),
    Answer(prompt="Name a colour.", completion="a\nlong\nanswer"),
    Answer(prompt="Sag «hallo»", completion="héllo 日本"),
]

PRELUDE = """\
import json, os, signal, subprocess, sys, time
def read():
    line = sys.stdin.readline()
    if not line: raise SystemExit
    return json.loads(line)
def write(record):
    print(json.dumps(record), flush=True)
def echo(line, **fields):
    write({**fields, **{k: v for k, v in line.items() if k.startswith("_retrograd")}})
def handshake():
    write(read())
def answer(lines):
    for line in lines:
        echo(line, reward=len(line["completion"]))
def batch():
    lines = []
    while "_retrograd_batch_end" not in (line := read()):
        lines.append(line)
    return lines, line
"""
"""Begins every program: the protocol in small pieces, to be broken in one of them."""


def program(directory: Path, body: str, name: str = "program.py") -> tuple[str, ...]:
    """The command of a Python program in `directory`."""
    (directory / name).write_text(PRELUDE + body, encoding="utf-8")
    return (sys.executable, name)


def make(directory: Path, body: str, **options: Any) -> CommandReward:
    """A reward that runs the program; `show`, `grace_seconds` are its own, the rest is configuration."""
    parts = {name: options.pop(name) for name in ("show", "grace_seconds") if name in options}
    parts.setdefault("grace_seconds", 1.0)
    options.setdefault("timeout_seconds", 20.0)
    return CommandReward(CommandConfig(command=program(directory, body), **options), directory, **parts)


@contextmanager
def nothing_left(directory: Path) -> Iterator[None]:
    """Fails if a process that works in `directory` is alive soon after the block."""
    yield
    deadline = time.monotonic() + 5
    while left := alive_in(directory):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


def alive_in(directory: Path) -> list[psutil.Process]:
    """Processes whose working directory it is; reward programs run in the directory of their TOML."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(directory.resolve()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
            continue
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another process."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
