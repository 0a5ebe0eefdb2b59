"""Fixtures of tests that need a container engine, and what counts what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.containers.engine import Engine, Kind, NoEngineError, find_or_start


def engine(kind: Kind) -> Engine:
    """An engine; the test fails where there is none, and says how to start one."""
    from retrograd.cache import cache_dir

    try:
        return find_or_start(kind, cache_dir())
    except NoEngineError as error:
        pytest.fail(str(error))


class Counter:
    """What is in an engine."""

    def __init__(self, host: str) -> None:
        import docker

        self.api: Any = docker.APIClient(base_url=host, version="auto")

    def containers(self) -> list[str]:
        """Names of all containers of retrograd, running or not."""
        found = self.api.containers(all=True, filters={"label": ["retrograd.run"]})
        return sorted(container["Names"][0].lstrip("/") for container in found)

    def volumes(self) -> list[str]:
        """Names of all volumes."""
        return sorted(volume["Name"] for volume in self.api.volumes().get("Volumes") or [])


@pytest.fixture(scope="session")
def docker_engine() -> Engine:
    """Docker, running."""
    return engine("docker")


@pytest.fixture(scope="session")
def podman_engine() -> Engine:
    """Podman, running."""
    return engine("podman")


def nothing_left(running: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """`DOCKER_HOST` is set; after the test there is no container or volume that was not there before.

    One of before may be gone: a run removes what an earlier one that was killed has left.
    """
    monkeypatch.setenv("DOCKER_HOST", running.host)
    counter = Counter(running.host)
    before = {*counter.containers(), *counter.volumes()}
    yield counter
    left = {*counter.containers(), *counter.volumes()} - before
    assert not left, "containers or volumes are left behind"
    counter.api.close()


@pytest.fixture
def docker(docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Docker, with nothing left behind."""
    yield from nothing_left(docker_engine, monkeypatch)


@pytest.fixture
def podman(podman_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Podman, with nothing left behind."""
    yield from nothing_left(podman_engine, monkeypatch)
