"""Containers: made, hardened, pooled, used, and removed."""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs

from retrograd_hookspecs import AuditFinding, ExecResult, RolloutError, Sandbox

from . import _scripts
from ._commands import ENVIRONMENT, MAX_WRITE_BYTES, SCRATCH, WORK, plain_arguments
from ._docker import Engine, in_thread
from ._docker_exec import run_exec
from ._images import Status, image_path, require_image
from ._ownership import RUN, Owner, containers, reap, remove
from ._pool import Pool
from .container import ContainerSandboxConfig

USER = 1000
CLEAR_SECS = 60.0
FILE_SECS = 60.0
SHELL = "/bin/sh"
_MIB = 1 << 20


@attrs.define(eq=False)
class Container:
    """A container that runs. `broken` says that it must not be used again."""

    name: str
    broken: bool = False


class Containers:
    """The provider; also what makes and ends members of its pool."""

    def __init__(self, config: ContainerSandboxConfig, status: Status) -> None:
        self.config = config
        self.exec_seconds = 0.0
        self.exec_count = 0
        self._status = status
        self._owner = Owner()
        self._engine: Engine | None = None
        self._digest = ""
        self._path = ""
        pool = config.pool
        self.places = pool.max_live
        uses = pool.max_leases_per_container if pool.reuse == "workspace" else 1
        self._pool: Pool[Container] = Pool(
            self, max_live=pool.max_live, min_idle=pool.min_idle, max_uses=uses
        )

    @property
    def engine(self) -> Engine:
        """Raises: `RolloutError` before `prepare`."""
        if self._engine is None:
            raise RolloutError("sandboxes were not prepared")
        return self._engine

    async def prepare(self) -> Sequence[AuditFinding]:
        """See `SandboxProvider.prepare`. The container that is tried out is the first to be used."""
        if self._engine is None:
            self._engine = await in_thread(Engine.connect, 4 * self.config.pool.max_live + 4)
        findings = [*await in_thread(self._engine_findings)]
        removed = await in_thread(reap, self.engine)
        if removed:
            text = f"removed {removed} containers that runs left which are gone"
            findings.append(AuditFinding(level="note", check="containers", message=text))
        image, dockerfile = self.config.image, self.config.dockerfile
        self._digest = await require_image(self.engine, image, dockerfile, self._status)
        self._path = await in_thread(image_path, self.engine, image)
        await in_thread(self._require_volume)
        findings.append(self._image_finding())
        await self._try_out()
        await self._pool.fill(self.config.pool.min_idle)
        return findings

    async def acquire(self) -> Sandbox:
        """A clean sandbox; waits for a place."""
        return ContainerSandbox(self, await self._pool.acquire())

    async def release(self, container: Container) -> None:
        """Take a container back."""
        await self._pool.release(container, broken=container.broken)

    async def warm_up(self, count: int) -> None:
        """Start containers, as far as there are places."""
        await self._pool.fill(max(count, self.config.pool.min_idle))

    def signature(self) -> Mapping[str, Any]:
        """The image, and what can change what a command does."""
        limits = self.config.limits
        return {
            "image": self._digest or self.config.image,
            "allow_network": self.config.allow_network,
            "cache_volume": self.config.cache_volume,
            "environment": dict(self.config.environment),
            "limits": attrs.asdict(limits),
        }

    def metrics(self) -> Mapping[str, float]:
        """Those of the pool, and `exec_ms_mean`."""
        seconds, count = self.exec_seconds, self.exec_count
        self.exec_seconds, self.exec_count = 0.0, 0
        return {**self._pool.metrics(), "exec_ms_mean": 1000.0 * seconds / max(count, 1)}

    async def close(self) -> None:
        """Remove all containers of this provider, whatever became of them. Raises: `RolloutError` if the
        engine does not let it."""
        import anyio

        await self._pool.close()
        engine, self._engine = self._engine, None
        if engine is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                await in_thread(self._remove_all, engine)
            finally:
                engine.close()

    async def make(self) -> Container:
        """Create and start a container."""
        return await in_thread(self._make)

    async def clean(self, item: Container) -> bool:
        """Kill its processes and delete its files."""
        try:
            await ContainerSandbox(self, item).clear()
        except RolloutError:
            return False
        return True

    async def end(self, item: Container) -> None:
        """Remove it. What the engine refuses is tried again by `close`."""
        if self._engine is None:
            return
        try:
            await in_thread(remove, self._engine, item.name)
        except RolloutError:
            return

    def _make(self) -> Container:
        engine, name = self.engine, self._owner.next_name()
        options = container_options(self.config, engine, self._path)
        try:
            with engine.reporting(f"cannot start a container of {self.config.image}"):
                engine.api.create_container(name=name, labels=self._owner.labels(), **options)
                engine.api.start(name)
        except BaseException:
            with suppress(RolloutError):  # its labels have it removed later
                remove(engine, name)
            raise
        return Container(name)

    def _remove_all(self, engine: Engine) -> None:
        for found in containers(engine, [f"{RUN}={self._owner.run}"]):
            remove(engine, found["Id"])

    def _engine_findings(self) -> list[AuditFinding]:
        engine = self.engine
        with engine.reporting("cannot ask about the engine"):
            info = engine.api.info()
        kind = "Podman" if engine.is_podman else "Docker"
        text = f"{kind} {info.get('ServerVersion', '')} at {engine.host}"
        findings = [AuditFinding(level="ok", check="containers", message=text)]
        limits = {"MemoryLimit": "memory_mb", "PidsLimit": "pids", "CpuCfsQuota": "cpus"}
        missing = [key for name, key in limits.items() if info.get(name) is False]
        if missing:
            text = f"{text} does not enforce {', '.join(missing)} of [agent.environment.limits]"
            findings.append(AuditFinding(level="warning", check="containers", message=text))
        return findings

    def _image_finding(self) -> AuditFinding:
        image, digest = self.config.image, self._digest
        if "@" in image:
            return AuditFinding(level="ok", check="image", message=image)
        text = f"{image} is now {digest}; a name can come to mean another image"
        return AuditFinding(level="note", check="image", message=text)

    def _require_volume(self) -> None:
        """A volume that is missing would be made, empty, by the engine."""
        name = self.config.cache_volume
        if name is None:
            return
        engine = self.engine
        with engine.reporting("cannot list volumes"):
            found = engine.api.volumes(filters={"name": name}).get("Volumes") or []
        if all(volume["Name"] != name for volume in found):
            raise RolloutError(
                f"there is no volume {name!r} for cache_volume; make it with `docker volume create {name}`"
                f" and fill it: it is mounted read-only at {self.config.cache_path}"
            )

    async def _try_out(self) -> None:
        """Raises: `RolloutError` if the image lacks what sandboxes need."""
        container = await self._pool.acquire()
        sandbox = ContainerSandbox(self, container)
        try:
            await self._use(sandbox)
            await sandbox.clear()
        except BaseException:
            container.broken = True
            await sandbox.close()
            raise
        self._pool.return_unused(container)

    async def _use(self, sandbox: Sandbox) -> None:
        script = 'for c in "$@"; do command -v "$c" >/dev/null || echo "$c"; done; id -u'
        result = await sandbox.exec([SHELL, "-c", script, "sh", *_scripts.NEEDED])
        *missing, user = result.stdout.decode("utf-8", "replace").split() or [""]
        if result.exit_code == 0 and missing:
            raise RolloutError(f"the image {self.config.image} does not have {', '.join(missing)}")
        if result.exit_code or user != str(USER):
            said = result.stderr.decode("utf-8", "replace").strip()[-300:]
            raise RolloutError(f"the image {self.config.image} cannot run commands with {SHELL}: {said}")
        await sandbox.write({f"{WORK}/.tried": b"tried"})
        if await sandbox.read(f"{WORK}/.tried", limit=10) != b"tried":
            raise RolloutError(f"files cannot be written in {WORK} of the image {self.config.image}")


def container_options(config: ContainerSandboxConfig, engine: Engine, path: str) -> dict[str, Any]:
    """Arguments of docker-py's `create_container`."""
    limits = config.limits
    variables = {**ENVIRONMENT, "PATH": f"{path}:/tmp/.local/bin", **config.environment}
    if engine.is_podman:  # where /work belongs to root, as it takes no owner for a tmpfs
        variables |= {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
    owner = "" if engine.is_podman else f",uid={USER},gid={USER}"
    memory = limits.memory_mb * _MIB

    def tmpfs(share: float) -> str:
        # Docker's default is noexec. A tmpfs counts as memory: a full one must leave room for `rm`.
        return f"rw,exec,nosuid,nodev,size={int(memory * share)},mode=1777{owner}"

    binds = {}
    if config.cache_volume is not None:
        binds = {config.cache_volume: {"bind": config.cache_path, "mode": "ro"}}
    return {
        "image": config.image,
        "entrypoint": [SHELL, "-c", _scripts.FIRST_PROCESS],
        "command": [],
        "user": f"{USER}:{USER}",
        "working_dir": WORK,
        "hostname": "sandbox",
        "environment": variables,
        "healthcheck": {"test": ["NONE"]},
        "host_config": engine.api.create_host_config(
            network_mode="bridge" if config.allow_network else "none",
            nano_cpus=int(limits.cpus * 1e9),
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=limits.pids,
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            tmpfs={WORK: tmpfs(0.5), "/tmp": tmpfs(0.25)},
            shm_size=min(64 * _MIB, memory // 8),
            binds=binds,
        ),
    }


class ContainerSandbox:
    """One lease of a container."""

    def __init__(self, provider: Containers, container: Container) -> None:
        self._provider = provider
        self._container = container
        self._closed = False

    @property
    def scratch(self) -> str:
        """See `Sandbox.scratch`."""
        return SCRATCH

    @property
    def name(self) -> str:
        """The engine's name of the container; not for the model."""
        return self._container.name

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_secs: float | None = None,
        max_output_bytes: int | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        arguments = plain_arguments(argv)
        if isinstance(arguments, ExecResult):
            return arguments
        limits = self._provider.config.limits
        return await self._run(
            [SHELL, "-c", _scripts.RUN, "sh", *arguments],
            stdin,
            limits.exec_timeout_secs if timeout_secs is None else timeout_secs,
            limits.max_output_bytes if max_output_bytes is None else max_output_bytes,
        )

    async def read(self, path: str, *, limit: int) -> bytes:
        """See `Sandbox.read`."""
        place = _absolute(path)
        script = [SHELL, "-c", _scripts.READ, "sh", place, str(limit)]
        result = await self._run(script, b"", FILE_SECS, limit)
        if result.exit_code == 0:
            return result.stdout
        raise _read_error(result.exit_code, path)

    async def write(self, files: Mapping[str, bytes]) -> None:
        """See `Sandbox.write`."""
        parts: list[bytes] = []
        for path, data in files.items():
            place = _absolute(path)
            if "\n" in place:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            if len(data) > MAX_WRITE_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            parts += [f"{len(data)}\n".encode(), place.encode("utf-8", "replace"), b"\n", data]
        if not parts:
            return
        script = [SHELL, "-c", _scripts.WRITE, "sh"]
        result = await self._run(script, b"".join(parts), FILE_SECS, 1 << 16)
        done = result.stdout.count(b"\n")
        if result.exit_code == 0 and done == len(files):
            return
        if result.timed_out:
            raise RolloutError("files could not be written in time")
        raise _write_error(result, list(files)[min(done, len(files) - 1)])

    async def clear(self, keep: Collection[str] = ()) -> None:
        """See `Sandbox.clear`."""
        script = [SHELL, "-c", _scripts.CLEAR, "sh", *keep]
        result = await self._run(script, b"", CLEAR_SECS, 4096)
        if result.exit_code or not result.stdout.endswith(_scripts.CLEARED):
            said = (result.stdout + result.stderr).decode("utf-8", "replace").strip()[-300:]
            self._container.broken = True
            raise RolloutError(f"the container could not be cleared: {said or f'exit {result.exit_code}'}")

    async def close(self) -> None:
        """See `Sandbox.close`."""
        if not self._closed:
            self._closed = True
            await self._provider.release(self._container)

    async def _run(self, argv: Sequence[str], stdin: bytes, timeout_secs: float, limit: int) -> ExecResult:
        if self._closed:
            raise RolloutError("the sandbox is closed")
        provider = self._provider
        started = time.monotonic()
        try:
            return await run_exec(
                provider.engine,
                self._container.name,
                argv,
                stdin=stdin,
                timeout_secs=timeout_secs,
                limit=limit,
            )
        except RolloutError:
            self._container.broken = True
            raise
        finally:
            provider.exec_seconds += time.monotonic() - started
            provider.exec_count += 1


def _absolute(path: str) -> str:
    if not path or "\0" in path:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    return path if path.startswith("/") else f"{WORK}/{path}"


def _read_error(code: int, path: str) -> Exception:
    numbers = {
        _scripts.NO_FILE: errno.ENOENT,
        _scripts.IS_DIRECTORY: errno.EISDIR,
        _scripts.NOT_READABLE: errno.EACCES,
        _scripts.NOT_REGULAR: errno.EINVAL,
    }
    number = numbers.get(code)
    if number is None:
        return RolloutError(f"a file could not be read: exit code {code}")
    return OSError(number, os.strerror(number), path)


@functools.cache
def _errors_by_text() -> Mapping[str, int]:
    names = (
        "ENOSPC EACCES EPERM EROFS EISDIR ENOTDIR EEXIST ENOENT ENAMETOOLONG ELOOP ETXTBSY EFBIG ENXIO EDQUOT"
    )
    return {os.strerror(getattr(errno, name)): getattr(errno, name) for name in names.split()}


def _write_error(result: ExecResult, path: str) -> Exception:
    """What `dd` or `mkdir` said, as an error of the operating system."""
    for line in reversed(result.stderr.decode("utf-8", "replace").splitlines()):
        number = _errors_by_text().get(line.rpartition(": ")[2])
        if number is not None:
            return OSError(number, os.strerror(number), path)
    said = result.stderr.decode("utf-8", "replace").strip()[-300:]
    return RolloutError(f"a file could not be written: exit code {result.exit_code}: {said}")
