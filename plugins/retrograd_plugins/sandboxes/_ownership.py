"""Whose containers are whose: labels, and a reaper of what killed runs left."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrograd_hookspecs import RolloutError

from ._docker import Engine, EngineRefusedError

RUN = "retrograd.run"
HOST = "retrograd.host"
PID = "retrograd.pid"
STARTED = "retrograd.started"
REMOVE_SECS = 30.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


class Owner:
    """This process as an owner of containers: host, process id, and when the process started."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.host = host_name()
        self.pid = os.getpid()
        self.started = start_time(self.pid)
        self._count = 0

    def labels(self) -> dict[str, str]:
        """Of every container of this owner."""
        return {RUN: self.run, HOST: self.host, PID: str(self.pid), STARTED: self.started or ""}

    def next_name(self) -> str:
        """A name that no other container has."""
        self._count += 1
        return f"retrograd-{self.run}-{self._count}"


def host_name() -> str:
    """Names where process ids mean the same: this host since it was booted, and their namespace."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        import psutil

        boot = str(int(psutil.boot_time()) // 60)
    return f"{socket.gethostname()}/{boot}/{namespace()}"


def namespace() -> int:
    """The process ids' namespace, which a run inside a container has to itself; 0 where there are none."""
    try:
        return _NAMESPACE.stat().st_ino
    except OSError:
        return 0


def start_time(pid: int) -> str | None:
    """When a process started; None if there is none. Exact on Linux, where process ids are used again."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.joinpath("self").exists():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    import psutil

    with suppress(psutil.Error):
        return str(round(psutil.Process(pid).create_time()))
    return None


def is_abandoned(labels: Mapping[str, str]) -> bool:
    """True if the owner was a process of this host that is gone. Another host's are left to it."""
    host, pid = labels.get(HOST, ""), labels.get(PID, "")
    if not pid.isdecimal():
        return False
    mine = host_name()
    if host != mine:
        # The same machine before it was restarted: the process is gone for certain.
        name, boot = (*host.split("/"), "")[:2]
        my_name, my_boot, _ = mine.split("/")
        return name == my_name and boot != my_boot
    return start_time(int(pid)) != labels.get(STARTED)


def containers(engine: Engine, labels: Iterable[str]) -> list[Mapping[str, Any]]:
    """Containers with the labels, those that never started included; blocks."""
    with engine.reporting("cannot list containers"):
        found: list[Mapping[str, Any]] = engine.api.containers(all=True, filters={"label": list(labels)})
        return found


def reap(engine: Engine) -> int:
    """Remove the containers of owners that are gone; how many. Blocks."""
    count = 0
    for found in containers(engine, [RUN]):
        if is_abandoned(found.get("Labels") or {}):
            remove(engine, found["Id"])
            count += 1
    return count


def remove(engine: Engine, container: str) -> None:
    """Remove a container and its anonymous volumes, running or not; one that is gone is fine. Blocks.

    Raises: `RolloutError` if it is still there after a while.
    """
    deadline = time.monotonic() + REMOVE_SECS
    while True:
        try:
            with engine.reporting(f"cannot remove the container {container}"):
                engine.api.remove_container(container, v=True, force=True)
            return
        except EngineRefusedError as error:
            if error.status == 404:
                return
            # 409 or 500 while another removal goes on, or while it is being started.
            if time.monotonic() > deadline:
                raise RolloutError(str(error)) from error
            time.sleep(0.05)
