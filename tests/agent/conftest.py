"""Fixtures of the tests of agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.fixtures import docker, docker_engine
from tests.judges.server import JudgeServer

from .support import SMALL, Agents

__all__ = ["agents", "docker", "docker_engine", "server"]


@pytest.fixture
def agents(tmp_path: Path, tiny_model: Callable[..., Path]) -> Agents:
    """A user's folder with a tiny model, scenarios and the environment `sums`."""
    return Agents(tmp_path, tiny_model(**SMALL))


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """An endpoint that judges honestly: a candidate whose text holds `worth 0.7` is worth 0.7."""
    served = JudgeServer()
    yield served
    served.close()
