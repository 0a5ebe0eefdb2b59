"""A local MCP server: a process that is spoken to in lines of JSON-RPC on stdin and stdout.

The SDK has such a transport too. This one passes on exactly the environment that a configuration says, keeps
what the server writes to stderr, and stays fast for long messages.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import anyio.abc

from retrograd_hookspecs import RolloutError

from .config import McpServer

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Longest message of a server."""
ALWAYS_PASSED = ("PATH", "HOME")
"""Variables that a server inherits whatever `env_passthrough` says."""
_GRACE_SECS = 2.0
"""How long a server has to end by itself, and then after SIGTERM."""
_POLL_SECS = 0.01
_LAST_WORDS_SECS = 0.5
"""How long the rest of a dead server's stderr is read; a process that it left may hold the pipe."""
_LOG_LINES = 20
_LOG_LINE_BYTES = 1000


class ServerLog:
    """The end of what a server said beside the protocol."""

    def __init__(self) -> None:
        self.stderr: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self.noise = ""
        """First line on stdout that was no message."""

    def text(self) -> str:
        """To end a message with; "" for nothing."""
        parts = []
        if self.noise:
            parts.append(f"its stdout, which belongs to the protocol, began with {self.noise!r}")
        if self.stderr:
            parts.append("its stderr ended with:\n    " + "\n    ".join(self.stderr))
        return ("; " + "; ".join(parts)) if parts else ""


def environment(server: McpServer, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a server is started with."""
    passed = server.env_passthrough
    names = environ if passed is None else (*ALWAYS_PASSED, *passed)
    return {**{name: environ[name] for name in names if name in environ}, **server.env}


@contextlib.asynccontextmanager
async def server_process(server: McpServer, log: ServerLog) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server, and give the streams that the SDK's session reads and writes. Ends the process and all
    that it started in its process group.

    Raises:
        RolloutError: the program cannot be started.
    """
    from mcp.shared.message import SessionMessage

    process = await _start(server)
    incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read_messages, process, incoming, log)
            tasks.start_soon(_write_messages, process, to_send, incoming)
            said_all = anyio.Event()
            tasks.start_soon(_read_log, process, log, said_all)
            try:
                yield received, outgoing
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process)
                    with anyio.move_on_after(_LAST_WORDS_SECS):
                        await said_all.wait()
                tasks.cancel_scope.cancel()
    finally:
        for stream in (incoming, received, outgoing, to_send):
            stream.close()
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def _start(server: McpServer) -> anyio.abc.Process:
    assert server.command is not None
    env = environment(server)
    program = shutil.which(server.command[0], path=env.get("PATH"))
    directory = server.cwd
    if directory is not None and not directory.is_dir():
        raise RolloutError(f"there is no directory {directory}, in which it should run")
    if directory is not None and program is None:
        program = shutil.which(directory / server.command[0])
    if program is None:
        raise RolloutError(f"there is no program {server.command[0]!r}")
    try:
        return await anyio.open_process(
            [os.path.abspath(program), *server.command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise RolloutError(f"{server.command[0]} cannot be started: {error.strerror or error}") from error


async def _read_messages(process: anyio.abc.Process, incoming: Any, log: ServerLog) -> None:
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    assert process.stdout is not None
    with incoming, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async for line in _lines(process.stdout, log):
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                if line.strip() and not log.noise:
                    log.noise = line[:_LOG_LINE_BYTES].decode("utf-8", errors="replace").strip()
                continue
            await incoming.send(SessionMessage(message))


async def _lines(stream: anyio.abc.ByteReceiveStream, log: ServerLog) -> AsyncIterator[bytes]:
    """Whole lines. The parts of a long one are joined once."""
    parts: list[bytes] = []
    size = 0
    async for chunk in stream:
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join((*parts, line))
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > MAX_MESSAGE_BYTES:
            log.stderr.append(f"[a message was longer than {MAX_MESSAGE_BYTES} bytes]")
            return


async def _write_messages(process: anyio.abc.Process, to_send: Any, incoming: Any) -> None:
    assert process.stdin is not None
    try:
        async for sent in to_send:
            text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
            await process.stdin.send(text.encode() + b"\n")
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        incoming.close()  # or the session would wait for an answer for ever


async def _read_log(process: anyio.abc.Process, log: ServerLog, said_all: anyio.Event) -> None:
    assert process.stderr is not None
    rest = b""
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async for chunk in process.stderr:
            *whole, rest = (rest + chunk).split(b"\n")
            rest = rest[:_LOG_LINE_BYTES]
            for line in whole:
                log.stderr.append(line[:_LOG_LINE_BYTES].decode("utf-8", errors="replace").rstrip())
    if rest:
        log.stderr.append(rest.decode("utf-8", errors="replace"))
    said_all.set()


async def _end(process: anyio.abc.Process) -> None:
    """Close stdin, then SIGTERM, then SIGKILL; the whole process group, for a server may have children."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.aclose()
    if not await _exits(process):
        _signal(process, signal.SIGTERM)
        await _exits(process)
    _signal(process, signal.SIGKILL)
    await _exits(process)


async def _exits(process: anyio.abc.Process) -> bool:
    # `wait` would also wait for the pipes, which a child of the server may hold.
    with anyio.move_on_after(_GRACE_SECS):
        while process.returncode is None:
            await anyio.sleep(_POLL_SECS)
    return process.returncode is not None


def _signal(process: anyio.abc.Process, number: signal.Signals) -> None:
    """To the server's process group, which outlives the server if a child of it does."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
