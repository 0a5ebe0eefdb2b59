"""A command in a running container, over the engine's hijacked connection.

The stream is read in the event loop, so that a deadline or a cancellation ends it at once. Closing the
connection does not end a command: everything in the container is killed by another one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from retrograd.task_errors import one_error
from retrograd_hookspecs import ExecResult, RolloutError

from ._commands import KILLED, Capture
from ._docker import Engine, EngineRefusedError, in_thread

if TYPE_CHECKING:
    import anyio

KILL_ALL = "kill -KILL -1"
"""Kills every process of the same user but PID 1 and the shell itself, in one step: nothing can fork on."""
KILL_SECS = 20.0
"""How long it may take until everything is killed."""
POLL_SECS = 0.02
WATCH_SECS = (0.3, 2.0)
"""How long a command is silent before the engine is asked whether it has ended: at first, and at most."""
DYING_SECS = 5.0
"""How long an engine may take to notice that a container's processes are dead."""
GRACE_SECS = 0.1
_HEADER = struct.Struct(">BxxxL")
_CHUNK_BYTES = 1 << 18
_STDOUT, _STDERR = 1, 2
_OF_THE_DEAD = (126, 127, 128, KILLED, 143, -1, 255)
"""Exit codes of commands whose container dies, and of those that the engine could not start in a dead one,
whose output is then a message of the engine; also what a program may end with by itself."""


@attrs.define(eq=False)
class ExecStream:
    """An exec that was started: its id, and its connection."""

    id: str
    socket: Any
    """The socket, which does not block."""
    reader: Any
    """Holds what came with the answer's headers; None once that is taken."""
    owners: tuple[Any, ...]
    """What else has to be closed."""

    def take_buffered(self) -> bytes:
        """Output that was read with the headers; once."""
        reader, self.reader = self.reader, None
        return bytes(reader.peek()) if reader is not None else b""

    def close(self) -> None:
        """Close the connection; the command runs on."""
        for part in (*self.owners, self.socket):
            try:
                part.close()
            except (OSError, ValueError):
                continue


def start_exec(engine: Engine, container: str, argv: Sequence[str], *, has_stdin: bool) -> ExecStream:
    """Start a command in `/`; blocks. Raises: `RolloutError`."""
    api = engine.api
    with engine.reporting("cannot run a command in the container"):
        exec_id = api.exec_create(container, list(argv), stdin=has_stdin, workdir="/")["Id"]
        raw = api.exec_start(exec_id, socket=True)
        response = raw._response
        raw._response = None  # else the two keep each other alive
        connection = getattr(raw, "_sock", raw)
        connection.setblocking(False)
        # docker-py hands out the socket below the reader that has read the headers, and with them, often,
        # the first bytes of output: they are still in that reader.
        reader = response.raw._fp.fp
    return ExecStream(id=exec_id, socket=connection, reader=reader, owners=(reader, raw, response))


async def run_exec(
    engine: Engine, container: str, argv: Sequence[str], *, stdin: bytes, timeout_secs: float, limit: int
) -> ExecResult:
    """Run a command to its end, or to its deadline.

    Raises: `RolloutError` if the engine or the container is gone, or cannot be made to stop the command.
    """
    import anyio

    stream = await _start(engine, container, argv, has_stdin=bool(stdin))
    stdout, stderr = Capture(limit), Capture(limit)
    frames = _Frames({_STDOUT: stdout, _STDERR: stderr})
    try:
        ended = False
        try:
            with anyio.move_on_after(timeout_secs):
                await _exchange(engine, stream, frames, stdin)
                ended = True
        except anyio.get_cancelled_exc_class():
            await _kill_all_uncancelled(engine, container)
            raise
        if not ended:
            await _kill_all_uncancelled(engine, container)
            with anyio.move_on_after(KILL_SECS):
                await _receive(stream, frames)
                ended = True
            if not ended:
                raise RolloutError("a command could not be stopped at its deadline")
            return _result(KILLED, stdout, stderr, timed_out=True)
        code = await _exit_code(engine, container, stream.id)
    finally:
        stream.close()
    return _result(code, stdout, stderr)


async def kill_all(engine: Engine, container: str) -> None:
    """Kill everything in the container. Raises: `RolloutError` if that cannot be done."""
    import anyio

    stream = await in_thread(_started, engine, container, ["/bin/sh", "-c", KILL_ALL])
    try:
        with anyio.move_on_after(KILL_SECS):
            await _receive(stream, _Frames({}))
            return
        raise RolloutError("the processes in the container could not be killed")
    finally:
        stream.close()


async def _kill_all_uncancelled(engine: Engine, container: str) -> None:
    import anyio

    with anyio.CancelScope(shield=True):
        await kill_all(engine, container)


async def require_running(engine: Engine, container: str) -> None:
    """Raises: `RolloutError` if the container does not run, with how it ended."""
    with engine.reporting("cannot look at the container"):
        try:
            state = (await in_thread(engine.api.inspect_container, container))["State"]
        except Exception as error:
            if getattr(error, "status_code", None) == 404:
                raise RolloutError("the container is gone: it was removed from outside") from error
            raise
    if not state.get("Running"):
        why = "out of memory, " if state.get("OOMKilled") else ""
        raise RolloutError(f"the container died ({why}exit code {state.get('ExitCode')})")


async def _require_alive(engine: Engine, container: str) -> None:
    """Raises: `RolloutError` unless the container still runs commands.

    Its state does not tell: for a while after its processes were killed the engine says that it runs.
    """
    import anyio

    await require_running(engine, container)
    with suppress(EngineRefusedError):
        stream = await in_thread(_started, engine, container, ["/bin/sh", "-c", "exit 0"])
        try:
            with anyio.move_on_after(KILL_SECS):
                await _receive(stream, _Frames({}))
            with engine.reporting("cannot look at a command"):
                found = await in_thread(engine.api.exec_inspect, stream.id)
        finally:
            stream.close()
        if found.get("ExitCode") == 0:
            return
    with anyio.move_on_after(DYING_SECS):
        while True:
            await require_running(engine, container)
            await anyio.sleep(POLL_SECS)
    raise RolloutError("the container does not run commands any more")


def _started(engine: Engine, container: str, argv: Sequence[str]) -> ExecStream:
    return start_exec(engine, container, argv, has_stdin=False)


async def _start(engine: Engine, container: str, argv: Sequence[str], *, has_stdin: bool) -> ExecStream:
    def start() -> ExecStream:
        return start_exec(engine, container, argv, has_stdin=has_stdin)

    try:
        return await in_thread(start)
    except EngineRefusedError:
        # 404, 409 or 500, depending on the engine: the container's state tells more.
        await require_running(engine, container)
        raise


async def _exchange(engine: Engine, stream: ExecStream, frames: _Frames, stdin: bytes) -> None:
    """Send input, and read output until the command has ended."""
    import anyio

    with one_error():
        async with anyio.create_task_group() as tasks:
            if stdin:
                tasks.start_soon(_send, stream, stdin)
            tasks.start_soon(_watch, engine, stream, frames, tasks.cancel_scope)
            await _receive(stream, frames)
            tasks.cancel_scope.cancel()  # the command may have ended without reading all of its input


async def _watch(engine: Engine, stream: ExecStream, frames: _Frames, scope: anyio.CancelScope) -> None:
    """End the exchange once the command has ended and no more comes.

    Docker keeps the stream of a command that has left a child in the background for a second or two longer.
    """
    import anyio

    wait, most = WATCH_SECS
    while True:
        before = frames.received
        await anyio.sleep(wait)
        if frames.received == before:
            with engine.reporting("cannot look at a command"):
                found = await in_thread(engine.api.exec_inspect, stream.id)
            if not found.get("Running") and frames.received == before:
                await anyio.sleep(GRACE_SECS)
                if frames.received == before:
                    scope.cancel()
                    return
            wait = min(2 * wait, most)


async def _send(stream: ExecStream, data: bytes) -> None:
    import socket

    import anyio

    left = memoryview(data)
    try:
        while left:
            try:
                left = left[stream.socket.send(left[:_CHUNK_BYTES]) :]
            except BlockingIOError:
                await anyio.wait_writable(stream.socket)
            await anyio.lowlevel.checkpoint()
        stream.socket.shutdown(socket.SHUT_WR)
    except (BrokenPipeError, ConnectionResetError):
        return  # the command is gone; what it wrote is still read
    except OSError as error:
        raise RolloutError(f"the connection to a command broke: {error.strerror or error}") from error


async def _receive(stream: ExecStream, frames: _Frames) -> None:
    """Read to the end of the stream."""
    import anyio

    frames.feed(stream.take_buffered())
    while True:
        try:
            data = stream.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            await anyio.wait_readable(stream.socket)
            continue
        except ConnectionResetError:
            return
        except OSError as error:
            raise RolloutError(f"the connection to a command broke: {error.strerror or error}") from error
        if not data:
            return
        frames.feed(data)
        await anyio.lowlevel.checkpoint()


async def _exit_code(engine: Engine, container: str, exec_id: str) -> int:
    """The exit code, once the engine knows it. Raises: `RolloutError` if the container is gone."""
    import anyio

    with anyio.move_on_after(KILL_SECS):
        while True:
            try:
                with engine.reporting("cannot look at a command"):
                    found = await in_thread(engine.api.exec_inspect, exec_id)
            except EngineRefusedError:
                await require_running(engine, container)
                raise
            if not found.get("Running") and found.get("ExitCode") is not None:
                code = int(found["ExitCode"])
                if code in _OF_THE_DEAD:
                    await _require_alive(engine, container)
                return code
            await require_running(engine, container)
            await anyio.sleep(POLL_SECS)
    raise RolloutError("the engine does not tell how a command ended")


def _result(code: int, stdout: Capture, stderr: Capture, *, timed_out: bool = False) -> ExecResult:
    return ExecResult(
        exit_code=code,
        stdout=stdout.bytes(),
        stderr=stderr.bytes(),
        timed_out=timed_out,
        truncated=stdout.dropped + stderr.dropped,
    )


class _Frames:
    """Takes the engine's stream apart: frames of a byte that names the stream, a length, and data."""

    def __init__(self, streams: Mapping[int, Capture]) -> None:
        self._streams = streams
        self._header = bytearray()
        self._left = 0
        self._target: Capture | None = None
        self.received = 0

    def feed(self, data: bytes) -> None:
        """Take some bytes, which may begin and end anywhere."""
        self.received += len(data)
        view = memoryview(data)
        while view:
            if not self._left:
                wanted = _HEADER.size - len(self._header)
                self._header += view[:wanted]
                view = view[wanted:]
                if len(self._header) == _HEADER.size:
                    kind, self._left = _HEADER.unpack(self._header)
                    self._target = self._streams.get(kind)
                    self._header.clear()
                continue
            part = view[: self._left]
            if self._target is not None:
                self._target.add(part)
            self._left -= len(part)
            view = view[len(part) :]
