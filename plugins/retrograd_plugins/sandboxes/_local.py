"""Temporary directories as sandboxes, and the processes that were started in them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrograd_hookspecs import AuditFinding, ExecResult, RolloutError, Sandbox

from ._commands import ENVIRONMENT, KILLED, MAX_WRITE_BYTES, SCRATCH, WORK, Capture, plain_arguments
from ._docker import in_thread
from ._ownership import namespace, start_time
from .local import LocalSandboxConfig

PREFIX = "retrograd-sandbox"
GRACE_SECS = 0.2
"""How long output is awaited that a command left in its pipes."""
KILL_SECS = 10.0
_RUN = 'ulimit -c 0; cd "$1" || exit 126; shift; exec "$@"'
_SHOWN = re.compile(rb"(?<![\w./~-])/(work|tmp)(?![\w-])")
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\w+)-")
_POLL_SECS = (0.002, 0.02)


class LocalSandboxes:
    """The provider. It has no pool: a directory is made in no time."""

    def __init__(self, config: LocalSandboxConfig) -> None:
        self.config = config
        self.exec_seconds = 0.0
        self.exec_count = 0
        self._live: set[LocalSandbox] = set()
        self._created = 0
        self._closed = False

    async def prepare(self) -> Sequence[AuditFinding]:
        """See `SandboxProvider.prepare`."""
        removed = await in_thread(_reap)
        text = "commands of the model run on this host, without isolation"
        findings = [AuditFinding(level="warning", check="sandbox", message=text)]
        if removed:
            text = f"removed {removed} directories that runs left which are gone"
            findings.append(AuditFinding(level="note", check="sandbox", message=text))
        return findings

    async def acquire(self) -> Sandbox:
        """A new directory."""
        if self._closed:
            raise RolloutError("the sandboxes are closed")
        owner = f"{namespace()}-{os.getpid()}-{start_time(os.getpid())}"
        try:
            root = Path(os.path.realpath(tempfile.mkdtemp(prefix=f"{PREFIX}-{owner}-")))
            sandbox = LocalSandbox(self, root)
        except OSError as error:
            raise RolloutError(f"no directory can be made for a sandbox: {error}") from error
        self._live.add(sandbox)
        self._created += 1
        return sandbox

    def forget(self, sandbox: LocalSandbox) -> None:
        """It is closed."""
        self._live.discard(sandbox)

    def signature(self) -> Mapping[str, Any]:
        """Nothing: what this host has installed is not known."""
        return {}

    async def warm_up(self, count: int) -> None:
        """There is nothing to make ready."""

    def metrics(self) -> Mapping[str, float]:
        """As those of containers, as far as they apply."""
        seconds, count, created = self.exec_seconds, self.exec_count, self._created
        self.exec_seconds, self.exec_count, self._created = 0.0, 0, 0
        return {
            "created": float(created),
            "live": float(len(self._live)),
            "exec_ms_mean": 1000.0 * seconds / max(count, 1),
        }

    async def close(self) -> None:
        """Close all sandboxes."""
        self._closed = True
        for sandbox in list(self._live):
            await sandbox.close()


class LocalSandbox:
    """One directory."""

    def __init__(self, provider: LocalSandboxes, root: Path) -> None:
        self._provider = provider
        self._root = root
        self._closed = False
        for name in ("work", "tmp"):
            (root / name).mkdir()

    @property
    def scratch(self) -> str:
        """See `Sandbox.scratch`."""
        return SCRATCH

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_secs: float | None = None,
        max_output_bytes: int | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        self._require_open()
        arguments = plain_arguments(argv)
        if isinstance(arguments, ExecResult):
            return arguments
        config = self._provider.config
        started = time.monotonic()
        try:
            return await self._run(
                [self._inside(part.encode()) for part in arguments],
                self._inside(stdin),
                config.exec_timeout_secs if timeout_secs is None else timeout_secs,
                config.max_output_bytes if max_output_bytes is None else max_output_bytes,
            )
        finally:
            self._provider.exec_seconds += time.monotonic() - started
            self._provider.exec_count += 1

    async def read(self, path: str, *, limit: int) -> bytes:
        """See `Sandbox.read`."""
        self._require_open()

        def read() -> bytes:
            place = self._place(path)
            if place.exists() and not place.is_dir() and not place.is_file():
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            with place.open("rb") as file:
                return file.read(limit)

        return await in_thread(_renaming, read, path)

    async def write(self, files: Mapping[str, bytes]) -> None:
        """See `Sandbox.write`."""
        self._require_open()

        def write() -> None:
            for path, data in files.items():
                _renaming(lambda path=path, data=data: self._write(path, data), path)

        await in_thread(write)

    async def clear(self, keep: Collection[str] = ()) -> None:
        """See `Sandbox.clear`."""
        self._require_open()

        def clear() -> None:
            self._kill()
            for name in ("work", "tmp"):
                if f"/{name}" not in keep:
                    _delete(self._root / name)
                    (self._root / name).mkdir()

        try:
            await in_thread(clear)
        except OSError as error:
            raise RolloutError(f"the sandbox could not be cleared: {error.strerror}") from error

    async def close(self) -> None:
        """See `Sandbox.close`. Raises nothing: what cannot be deleted is tried again by the next run."""
        import anyio

        if self._closed:
            return
        self._closed = True
        self._provider.forget(self)

        def end() -> None:
            with suppress(OSError, RolloutError):
                self._kill()
                _delete(self._root)

        with anyio.CancelScope(shield=True):
            await in_thread(end)

    async def _run(self, argv: Sequence[bytes], stdin: bytes, timeout_secs: float, limit: int) -> ExecResult:
        import anyio

        process = await in_thread(self._start, argv, bool(stdin))
        streams = {process.stdout: Capture(limit), process.stderr: Capture(limit)}
        ended = False
        try:
            try:
                with anyio.move_on_after(timeout_secs):
                    async with anyio.create_task_group() as tasks:
                        if process.stdin is not None:
                            tasks.start_soon(_send, process.stdin, stdin)
                        for pipe, into in streams.items():
                            tasks.start_soon(_receive, pipe, into)
                        await _wait(process)
                        ended = True
                        tasks.cancel_scope.deadline = anyio.current_time() + GRACE_SECS
            finally:
                if not ended:
                    with anyio.CancelScope(shield=True):
                        await in_thread(self._kill)
                        await _wait(process)
        finally:
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        stdout, stderr = streams[process.stdout], streams[process.stderr]
        code = process.returncode
        return ExecResult(
            exit_code=KILLED if not ended else code if code >= 0 else 128 - code,
            stdout=self._outside(stdout),
            stderr=self._outside(stderr),
            timed_out=not ended,
            truncated=stdout.dropped + stderr.dropped,
        )

    def _start(self, argv: Sequence[bytes], has_stdin: bool) -> subprocess.Popen[bytes]:
        work = self._root / "work"
        with suppress(FileExistsError):
            work.mkdir()
        try:
            process = subprocess.Popen(
                [b"/bin/sh", b"-c", _RUN.encode(), b"sh", os.fsencode(work), *argv],
                stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=self._root,
                env=self._environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise RolloutError(f"a command could not be started: {error.strerror or error}") from error
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        return process

    def _environment(self) -> dict[str, str]:
        """Nothing of retrograd's own: keys of judges are in its environment."""
        temporary = str(self._root / "tmp")
        return {
            **ENVIRONMENT,
            "HOME": temporary,
            "TMPDIR": temporary,
            "PATH": f"{os.environ.get('PATH', os.defpath)}:{temporary}/.local/bin",
        }

    def _inside(self, data: bytes) -> bytes:
        """`/work` and `/tmp` as they are called on this host, in text."""
        if b"\0" in data:
            return data
        root = os.fsencode(self._root)
        return _SHOWN.sub(lambda match: root + b"/" + match[1], data)

    def _outside(self, capture: Capture) -> bytes:
        """Output as the model sees it; what is no text stays as it is."""
        root, data = os.fsencode(self._root), capture.bytes()
        if b"\0" in data:
            return data
        if capture.dropped:  # a path may be cut at the end
            for length in range(len(root) - 1, len(os.fsencode(self._root.parent)), -1):
                if data.endswith(root[:length]):
                    data = data[:-length]
                    break
        return data.replace(root + b"/", b"/").replace(root, b"/")

    def _place(self, path: str) -> Path:
        if not path or "\0" in path:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        place = path if path.startswith("/") else f"{WORK}/{path}"
        return Path(os.fsdecode(self._inside(place.encode("utf-8", "replace"))))

    def _write(self, path: str, data: bytes) -> None:
        if len(data) > MAX_WRITE_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)

    def _kill(self) -> None:
        """Kill what runs in the directory or has it as its home. Raises: `RolloutError`."""
        deadline = time.monotonic() + KILL_SECS
        while alive := _processes(self._root):
            for pid in alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RolloutError("processes of a sandbox could not be killed")
            time.sleep(0.01)

    def _require_open(self) -> None:
        if self._closed:
            raise RolloutError("the sandbox is closed")


async def _wait(process: subprocess.Popen[bytes]) -> None:
    import anyio

    shortest, longest = _POLL_SECS
    delay = shortest
    while process.poll() is None:
        await anyio.sleep(delay)
        delay = min(2 * delay, longest)


async def _send(pipe: Any, data: bytes) -> None:
    import anyio

    left = memoryview(data)
    with suppress(BrokenPipeError):
        while left:
            try:
                left = left[os.write(pipe.fileno(), left[: 1 << 16]) :]
            except BlockingIOError:
                await anyio.wait_writable(pipe)
            await anyio.lowlevel.checkpoint()
    pipe.close()


async def _receive(pipe: Any, into: Capture) -> None:
    import anyio

    while True:
        try:
            data = os.read(pipe.fileno(), 1 << 18)
        except BlockingIOError:
            await anyio.wait_readable(pipe)
            continue
        if not data:
            return
        into.add(data)
        await anyio.lowlevel.checkpoint()


def _processes(root: Path) -> list[int]:
    """Processes that run below a directory, or were given it as their home."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            inside = Path(process.cwd()).is_relative_to(root)
            if inside or process.environ().get("HOME") == str(root / "tmp"):
                found.append(process.pid)
    return found


def _renaming(function: Any, path: str) -> Any:
    """Call it; errors name the path as it was given."""
    try:
        return function()
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _delete(path: Path) -> None:
    """Delete a tree, also where its directories may not be entered."""

    def again(function: Any, name: str, _: Any) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(name), stat.S_IRWXU)
        with suppress(OSError):
            os.chmod(name, stat.S_IRWXU)
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
        else:
            os.unlink(name)

    with suppress(FileNotFoundError):
        shutil.rmtree(path, onerror=again)


def _reap() -> int:
    """Delete directories of processes that are gone, and kill what runs in them; how many."""
    count = 0
    for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        match = _NAME.match(place.name)
        if match is None or int(match[1]) != namespace() or not place.is_dir():
            continue  # in a container that shares this directory, a process id means another process
        if start_time(int(match[2])) == match[3]:
            continue
        root = Path(os.path.realpath(place))
        for pid in _processes(root):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(OSError):  # another user's
            _delete(root)
            count += 1
    return count
