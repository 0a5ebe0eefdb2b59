"""Contract of a sandbox provider: `check_sandboxes(make)` raises `AssertionError` where it is broken."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from retrograd_hookspecs import ExecResult, RolloutError, Sandbox, SandboxProvider

LATE_SECS = 0.5
STOP_SECS = 20.0
"""How long a command may go on after its deadline, or after it is given up."""


async def check_sandboxes(make: Callable[[], SandboxProvider]) -> None:
    """Check what every provider of sandboxes promises, with a provider that `make` gives.

    Commands have their exit code, output and input; what is too long is cut and counted; what is late is
    killed, with all that it started. Files come back as they were written, and errors have their classes. A
    sandbox is clean, shares nothing with another, and shows the model the same things as another. It can be
    cleared, and closed twice. Needs a POSIX shell and its usual commands in the sandbox.
    """
    provider = make()
    try:
        for finding in await provider.prepare():
            assert finding.level in ("ok", "note", "warning", "error"), finding
        json.dumps(dict(provider.signature()))
        await provider.warm_up(1)
        for checks in ((_clearing, _commands, _limits, _files), (_giving_up, _closing)):
            sandbox = await provider.acquire()
            try:
                for check in checks:
                    await check(sandbox)
            finally:
                await sandbox.close()
        await _two_at_once(provider)
        check_metrics(provider.metrics())
    finally:
        await provider.close()
        await provider.close()
    await _raises(RolloutError, provider.acquire(), "a closed provider gives a sandbox")


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Names without a prefix, and finite numbers."""
    for name, value in metrics.items():
        assert "/" not in name, f"{name}: names have no prefix"
        assert math.isfinite(value), f"{name}: {value}"


async def _commands(sandbox: Sandbox) -> None:
    result = await _shell(sandbox, "echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n"), result
    assert not result.timed_out, result
    assert result.truncated == 0, result
    result = await sandbox.exec(["printf", "%s|", "a b", "", "$HOME", "'"])
    assert result.stdout == b"a b||$HOME|'|", "arguments go through a shell"
    text = bytes(range(1, 256)) * 2000
    result = await sandbox.exec(["cat"], stdin=text, max_output_bytes=len(text))
    assert result.stdout == text, "stdin and stdout are not what was sent"
    result = await sandbox.exec(["cat"])
    assert (result.exit_code, result.stdout) == (0, b""), "stdin is not empty"
    result = await sandbox.exec(["true"], stdin=b"x" * 1_000_000)
    assert result.exit_code == 0, "a command that does not read its stdin fails"
    result = await sandbox.exec(["no-such-program"])
    assert result.exit_code == 127, f"a missing program ends with {result.exit_code}"
    result = await sandbox.exec(["echo", "a\0b", "\ud800"])
    assert result.exit_code != 0, "a null byte in an argument"
    result = await sandbox.exec(["pwd"])
    assert result.stdout == b"/work\n", f"the working directory is shown as {result.stdout!r}"


async def _limits(sandbox: Sandbox) -> None:
    import anyio

    count = 300_000
    script = f"head -c {count} /dev/zero | tr '\\0' x; head -c {count} /dev/zero | tr '\\0' y >&2"
    result = await sandbox.exec(["sh", "-c", script], max_output_bytes=1000)
    assert (result.stdout, result.stderr) == (b"x" * 1000, b"y" * 1000), "the first bytes are kept"
    assert result.truncated == 2 * (count - 1000), f"{result.truncated} bytes were counted"
    with anyio.fail_after(STOP_SECS):
        late = "echo before; (while :; do echo more >>ticks; sleep 0.05; done) & sleep 1000"
        result = await sandbox.exec(["sh", "-c", late], timeout_secs=LATE_SECS)
    assert result.timed_out, result
    assert result.stdout == b"before\n", result
    before = await sandbox.read("ticks", limit=1 << 20)
    await anyio.sleep(0.3)
    assert await sandbox.read("ticks", limit=1 << 20) == before, "what a late command started goes on"
    assert (await _shell(sandbox, "echo on")).stdout == b"on\n", "nothing runs after a late command"


async def _files(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 500
    files = {"a/b/data.bin": data, "empty": b"", "/work/näme with 'quotes'": b"x\ny", "tool": b"#!/bin/sh\n"}
    await sandbox.write(files)
    for path, content in files.items():
        assert await sandbox.read(path, limit=1 << 20) == content, f"{path} came back changed"
    assert await sandbox.read("/work/a/b/data.bin", limit=10) == data[:10]
    await _shell(sandbox, "chmod 755 tool")
    await sandbox.write({"tool": b"#!/bin/sh\necho new\n", "a/b/data.bin": b"short"})
    assert (await sandbox.exec(["./tool"])).stdout == b"new\n", "writing takes the mode of a file away"
    assert await sandbox.read("a/b/data.bin", limit=100) == b"short"
    await sandbox.write({f"{sandbox.scratch}/t/script": b"1"})
    assert await sandbox.read(f"{sandbox.scratch}/t/script", limit=5) == b"1"
    assert not sandbox.scratch.startswith("/work"), "scratch is in the working directory"
    await _raises(FileNotFoundError, sandbox.read("nothing", limit=1), "a missing file is read")
    await _raises(IsADirectoryError, sandbox.read("a", limit=1), "a directory is read")
    await _raises(OSError, sandbox.write({"a": b""}), "a directory is written to")
    await _raises(OSError, sandbox.write({"empty/x": b""}), "a file is used as a directory")
    await sandbox.write({})


async def _clearing(sandbox: Sandbox) -> None:
    assert (await _shell(sandbox, "ls -A /work")).stdout == b"", "a new sandbox has files"
    await sandbox.write({"work": b"1", f"{sandbox.scratch}/s": b"2"})
    await _shell(sandbox, "echo 3 >/tmp/t; mkdir -p d/e; chmod 0 d; (sleep 1000 &) ; true")
    await sandbox.clear(keep=("/work",))
    assert await sandbox.read("work", limit=5) == b"1", "clearing deletes what is to be kept"
    await _raises(FileNotFoundError, sandbox.read("/tmp/t", limit=1), "clearing leaves files")
    await _raises(FileNotFoundError, sandbox.read(f"{sandbox.scratch}/s", limit=1), "clearing leaves files")
    await sandbox.clear()
    assert (await _shell(sandbox, "ls -A /work /tmp")).stdout == b"/tmp:\n\n/work:\n", "clearing leaves files"


async def _giving_up(sandbox: Sandbox) -> None:
    import anyio

    with anyio.fail_after(STOP_SECS):
        with anyio.move_on_after(LATE_SECS) as scope:
            await sandbox.exec(["sh", "-c", "while :; do echo more >>ticks; sleep 0.05; done"])
        assert scope.cancelled_caught
        before = await sandbox.read("ticks", limit=1 << 20)
        await anyio.sleep(0.3)
        assert await sandbox.read("ticks", limit=1 << 20) == before, "a command goes on that was given up"


async def _closing(sandbox: Sandbox) -> None:
    await sandbox.close()
    await sandbox.close()
    await _raises(RolloutError, sandbox.exec(["true"]), "a closed sandbox runs a command")
    await _raises(RolloutError, sandbox.read("x", limit=1), "a closed sandbox reads a file")


async def _two_at_once(provider: SandboxProvider) -> None:
    one, two = await provider.acquire(), await provider.acquire()
    try:
        await one.write({"mine": b"1"})
        await _raises(FileNotFoundError, two.read("mine", limit=1), "sandboxes share files")
        script = "pwd; cd; pwd; umask; ls -1Ap /work /tmp; rm -f /work/mine; env | grep -v '^_=' | sort"
        await one.exec(["rm", "mine"])
        seen = [(await _shell(sandbox, script)).stdout for sandbox in (one, two)]
        assert seen[0] == seen[1], f"sandboxes look different: {seen}"
    finally:
        await one.close()
        await two.close()


async def _shell(sandbox: Sandbox, script: str) -> ExecResult:
    return await sandbox.exec(["sh", "-c", script])


async def _raises(kind: type[Exception], action: Awaitable[Any], otherwise: str) -> None:
    try:
        await action
    except kind:
        return
    raise AssertionError(otherwise)


__all__: Sequence[str] = ("check_metrics", "check_sandboxes")
