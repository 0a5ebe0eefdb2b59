"""Containers in a real engine: isolation, faults, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from retrograd_hookspecs import ExecResult, RolloutError, Sandbox
from retrograd_plugins.sandboxes._containers import Containers
from retrograd_plugins.sandboxes._docker import Engine
from retrograd_plugins.sandboxes.container import ContainerSandboxConfig, Limits, Pool
from tests.containers.engine import BUSYBOX_IMAGE, PYTHON_IMAGE, start
from tests.containers.fixtures import Counter
from tests.containers.registry import digest, registry

SMALL = Limits(memory_mb=64, pids=32, exec_timeout_secs=20.0)


def containers(image: str = BUSYBOX_IMAGE, status: list[str] | None = None, **keys: Any) -> Containers:
    keys = {"limits": SMALL, "pool": Pool(max_live=2), **keys}
    messages = status if status is not None else []
    return Containers(ContainerSandboxConfig(image=image, **keys), messages.append)


def used(provider: Containers, use: Callable[[Containers], Awaitable[Any]]) -> Any:
    """`use(provider)` after `prepare`; everything is closed."""

    async def run() -> Any:
        try:
            await provider.prepare()
            return await use(provider)
        finally:
            await provider.close()

    return anyio.run(run)


def shell(provider: Containers, script: str) -> ExecResult:
    """What a script gives in a new sandbox."""

    async def use(provider: Containers) -> ExecResult:
        sandbox = await provider.acquire()
        return await sandbox.exec(["sh", "-c", script])

    result: ExecResult = used(provider, use)
    return result


def test_a_container_can_do_little(docker: Counter) -> None:
    script = """
id -u; ls /sys/class/net; grep -E 'CapEff|NoNewPrivs' /proc/self/status; cat /proc/sys/kernel/hostname
touch /etc/x 2>/dev/null || echo read-only; mount -t tmpfs x /work 2>/dev/null || echo no mounts
head -c 100000000 /dev/zero | tail -c 100000000 >/dev/null; echo "memory $?"
printf '#!/bin/sh\\necho runs\\n' >/work/x; chmod 755 /work/x; /work/x; kill -9 1; echo alive
"""
    lines = shell(containers(), script).stdout.decode().split("\n")
    assert lines[:2] == ["1000", "lo"]
    assert [line.split() for line in lines[2:4]] == [["CapEff:", "0" * 16], ["NoNewPrivs:", "1"]]
    assert lines[4:] == ["sandbox", "read-only", "no mounts", "memory 137", "runs", "alive", ""]


def test_git_works_in_the_working_directory(docker: Counter, podman_engine: Any, monkeypatch: Any) -> None:
    script = "git init -q . && echo a >a && git add a && git commit -qm 'one' && git log --format=%H"
    hashes = [shell(containers(PYTHON_IMAGE, limits=Limits(memory_mb=128)), script).stdout]
    monkeypatch.setenv("DOCKER_HOST", podman_engine.host)
    hashes.append(shell(containers(PYTHON_IMAGE, limits=Limits(memory_mb=128)), script).stdout)
    assert len(hashes[0]) == 41, hashes
    assert hashes[0] == hashes[1], "commits differ from time to time"


def test_processes_are_limited_and_a_fork_bomb_is_ended(docker: Counter) -> None:
    async def use(provider: Containers) -> None:
        sandbox = await provider.acquire()
        bomb = await sandbox.exec(["sh", "-c", "b() { b | b & }; b; while :; do :; done"], timeout_secs=1.0)
        assert bomb.timed_out
        left = await sandbox.exec(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"])
        assert int(left.stdout) <= 5

    used(containers(), use)


def test_a_full_disk_is_an_error_of_files_and_can_be_cleared(docker: Counter) -> None:
    async def use(provider: Containers) -> None:
        sandbox = await provider.acquire()
        full = await sandbox.exec(["dd", "if=/dev/zero", "of=/work/big", "bs=1M"])
        assert b"No space left on device" in full.stderr
        with pytest.raises(OSError, match="No space left") as caught:
            await sandbox.write({"more": b"x" * 10_000})
        assert caught.value.filename == "more"
        await sandbox.clear()
        await sandbox.write({"more": b"x"})

    used(containers(), use)


def test_a_hundred_megabytes_of_output_are_counted(docker: Counter) -> None:
    limits = Limits(memory_mb=64, max_output_bytes=1024)
    result = shell(containers(limits=limits), "head -c 100000000 /dev/zero")
    assert (len(result.stdout), result.truncated, result.exit_code) == (1024, 100_000_000 - 1024, 0)


def test_a_cleared_container_keeps_nothing(docker: Counter) -> None:
    traces = """
mkdir -p /work/a/b /tmp/c; touch /work/.hidden /work/..x "/work/ spaced" /dev/shm/s /work/-rf; ln -s / /work/l
chmod 0 /work/a /work/.hidden; chmod 0 /tmp; (trap '' TERM; sleep 100) & setsid sleep 100 & sleep 0.1
chmod 0 /work
"""

    async def use(provider: Containers) -> None:
        names = []
        for _ in range(3):
            sandbox = await provider.acquire()
            names.append(sandbox.name)  # type: ignore[attr-defined]
            seen = await sandbox.exec(
                ["sh", "-c", "ls -A /work /tmp /dev/shm; stat -c %a /work /tmp; ps | grep -c '[s]leep [13]'"]
            )
            assert seen.stdout == b"/dev/shm:\n\n/tmp:\n\n/work:\n1777\n1777\n2\n", seen
            await sandbox.exec(["sh", "-c", traces])
            await sandbox.close()
        assert names[0] == names[1] != names[2], "two leases a container"

    pool = Pool(max_live=1, reuse="workspace", max_leases_per_container=2)
    used(containers(pool=pool), use)


def test_cancellation_at_any_moment_releases_the_container(docker: Counter) -> None:
    async def use(provider: Containers) -> None:
        for moment in (0.0, 0.05, 0.2, 0.5, 0.8, 1.2):
            with anyio.move_on_after(moment):
                sandbox: Sandbox = await provider.acquire()
                try:
                    await sandbox.write({"a": b"b" * 1_000_000})
                    await sandbox.exec(["sleep", "100"])
                finally:
                    await sandbox.close()
                    await sandbox.close()
            names = await anyio.to_thread.run_sync(docker.containers)
            assert len(names) == provider.metrics()["live"], f"after {moment} s"

    used(containers(), use)


def test_descriptors_do_not_add_up(docker: Counter) -> None:
    async def use(provider: Containers) -> None:
        sandbox = await provider.acquire()

        async def some(count: int) -> int:
            for _ in range(count):
                await sandbox.exec(["cat"], stdin=b"x")
            return len(os.listdir("/dev/fd"))

        before = await some(5)
        assert await some(10) <= before

    used(containers(), use)


def test_containers_of_a_killed_process_are_removed_by_the_next_run(docker: Counter) -> None:
    program = f"""
import anyio
from tests.sandboxes.test_containers import containers
from retrograd_plugins.sandboxes._containers import container_options
async def main():
    provider = containers({BUSYBOX_IMAGE!r})
    await provider.prepare()
    await provider.acquire()
    options = container_options(provider.config, provider.engine, "/bin")
    owner = provider._owner
    provider.engine.api.create_container(name=owner.next_name(), labels=owner.labels(), **options)
    print("ready", flush=True)
    await anyio.sleep(100)
anyio.run(main)
"""
    before = len(docker.containers())
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        provider = containers()

        async def of_the_living(provider: Containers) -> int:
            return len(docker.containers())

        assert used(provider, of_the_living) == before + 3, "one that is alive keeps its own"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert len(docker.containers()) == before + 2

    async def findings() -> list[str]:
        provider = containers()
        try:
            return [finding.message for finding in await provider.prepare()]
        finally:
            await provider.close()

    assert any("removed 2 containers" in message for message in anyio.run(findings))
    assert len(docker.containers()) == before


async def outcome(work: Awaitable[ExecResult]) -> ExecResult | BaseException:
    """What a command gives, or raises."""
    try:
        return await work
    except Exception as error:
        return error


async def later(seconds: float, function: Callable[..., Any], *arguments: Any) -> None:
    await anyio.sleep(seconds)
    function(*arguments)


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_a_container_that_is_killed_under_a_command(kind: str, request: pytest.FixtureRequest) -> None:
    """The engine learns of it after the command has ended: the exit code alone would look like a result."""
    counter: Counter = request.getfixturevalue(kind)

    async def use(provider: Containers) -> list[ExecResult | BaseException]:
        ended = []
        for number in (signal.SIGKILL, signal.SIGTERM):
            sandbox = await provider.acquire()
            first = counter.api.inspect_container(sandbox.name)["State"]["Pid"]  # type: ignore[attr-defined]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(later, 0.3, os.kill, first, number)
                ended.append(await outcome(sandbox.exec(["sleep", "100"])))
            await sandbox.close()
        return ended

    ended = used(containers(), use)
    assert [type(one) for one in ended] == [RolloutError] * 2, ended
    assert all("the container died" in str(one) for one in ended), ended


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_a_command_that_is_killed_alone_has_a_result(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kind)

    async def use(provider: Containers) -> list[int]:
        sandbox = await provider.acquire()
        scripts = ("exec tail -c 100000000 /dev/zero", "kill -KILL $$", "kill -TERM $$", "exit 255", "echo")
        return [(await sandbox.exec(["sh", "-c", script])).exit_code for script in scripts]

    assert used(containers(), use) == [137, 137, 143, 255, 0], "the first one is out of memory"


def test_a_container_that_is_removed_from_outside(docker: Counter) -> None:
    async def use(provider: Containers) -> None:
        sandbox = await provider.acquire()
        docker.api.remove_container(sandbox.name, force=True)  # type: ignore[attr-defined]
        with pytest.raises(RolloutError, match="the container is gone: it was removed from outside"):
            await sandbox.exec(["true"])
        await sandbox.close()
        fresh = await provider.acquire()
        assert (await fresh.exec(["true"])).exit_code == 0

    used(containers(pool=Pool(max_live=1, reuse="workspace")), use)


def refused(provider: Containers) -> str:
    """Why `prepare` fails."""

    async def run() -> str:
        try:
            await provider.prepare()
        except RolloutError as error:
            return str(error)
        finally:
            await provider.close()
        raise AssertionError("it was prepared")

    return anyio.run(run)


def test_an_engine_that_is_not_there(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    said = refused(containers())
    assert said.startswith(
        f"no container engine answers at unix://{tmp_path}/none.sock (DOCKER_HOST): No such file"
    )
    assert "start Docker Desktop, Colima" in said
    monkeypatch.setenv("DOCKER_HOST", "ssh://host")
    assert "cannot be used" in refused(containers())


def test_images_that_are_not_there_or_do_not_fit(docker: Counter) -> None:
    assert "its name is that of no registry" in refused(containers("localhost/nothing:1"))
    said = refused(containers("registry.invalid/nothing:1"))
    assert "cannot pull the image registry.invalid/nothing:1" in said or "failed pulling" in said
    assert "there is no volume 'nothing' for cache_volume" in refused(containers(cache_volume="nothing"))
    assert docker.api.images("localhost/nothing") == []


def test_an_image_is_built_where_it_is_missing(docker: Counter) -> None:
    image = "localhost/retrograd-test-built:1"
    dockerfile = f"FROM {BUSYBOX_IMAGE}\nRUN mkdir /extra && chmod 1777 /work /tmp\n"
    status: list[str] = []
    try:
        assert shell(containers(image, status, dockerfile=dockerfile), "ls -d /extra").stdout == b"/extra\n"
        assert any(message.startswith(f"building {image}: Step") for message in status)
        broken = containers("localhost/retrograd-test-broken:1", dockerfile=dockerfile + "RUN exit 7\n")
        assert "failed building localhost/retrograd-test-broken:1" in refused(broken)
    finally:
        docker.api.remove_image(image, force=True)


def test_an_image_is_pulled_where_it_is_missing(docker: Counter) -> None:
    """Once, with progress, and its digest is the registry's."""
    with registry(b"".join(docker.api.get_image(BUSYBOX_IMAGE))) as served:
        status: list[str] = []
        try:
            provider = containers(served.image, status)
            assert shell(provider, "wc -c </chance").stdout.split() == [b"3000000"]
            said = [message for message in status if message.startswith(f"pulling {served.image}: ")]
            assert any(re.search(r": \d+ of [1-9]\d* MB$", message) for message in said), status
            assert status[-1] == ""
            asked = served.requests.copy()
            again: list[str] = []
            provider = containers(served.image, again)
            shell(provider, "true")
            assert provider.signature()["image"] == digest(served.manifest)
            assert (served.requests, again) == (asked, [])
            missing = served.image.replace(":one", ":two")
            assert f"cannot pull the image {missing}" in refused(containers(missing))
        finally:
            docker.api.remove_image(served.image, force=True)


def test_a_cache_volume_can_be_read_and_not_written(docker: Counter) -> None:
    docker.api.create_volume("retrograd-test-cache")
    try:
        provider = containers(cache_volume="retrograd-test-cache", cache_path="/cache/x")
        result = shell(provider, "ls -A /cache/x && touch /cache/x/y")
        assert result.exit_code == 1
        assert b"Read-only file system" in result.stderr
    finally:
        docker.api.remove_volume("retrograd-test-cache")


def test_an_engine_that_stops(docker: Counter, tmp_path: Path, monkeypatch: Any) -> None:
    engine = start("docker", tmp_path / "e", None)
    stopped = False
    try:
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        other = Engine.connect(4)
        other.api.load_image(b"".join(docker.api.get_image(BUSYBOX_IMAGE)))
        other.close()
        ended: list[ExecResult | BaseException] = []

        async def use(provider: Containers) -> None:
            nonlocal stopped
            sandbox = await provider.acquire()
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(anyio.to_thread.run_sync, engine.stop)
                    ended.append(await outcome(sandbox.exec(["sleep", "100"])))
                stopped = True
                with pytest.raises(RolloutError, match="does not answer"):
                    await sandbox.exec(["true"])
                await sandbox.close()
                with pytest.raises(RolloutError, match="does not answer"):
                    await provider.acquire()

        with pytest.raises(RolloutError, match="cannot list containers: the container engine at"):
            used(containers(), use)
        assert [type(one) for one in ended] == [RolloutError], ended
    finally:
        if not stopped:
            engine.stop()
