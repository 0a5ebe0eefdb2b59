"""What an engine says late, or not at all, while a command runs: no real engine does so when it is wanted."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import anyio
import docker.errors
import pytest
import requests

from retrograd_hookspecs import ExecResult, RolloutError
from retrograd_plugins.sandboxes import _docker_exec
from retrograd_plugins.sandboxes._docker import Engine
from retrograd_plugins.sandboxes._docker_exec import run_exec


class Api:
    """A container engine whose container is killed as soon as a command runs in it.

    Args:
        states: what it says of the container, one after another; the last one for ever.
        starts: how many commands it starts.
        stays_open: the connection of a command does not end.
    """

    def __init__(self, *, states: list[Mapping[str, Any]], starts: int = 1, stays_open: bool = False) -> None:
        self._states = states
        self._starts = starts
        self._stays_open = stays_open
        self._ends: list[socket.socket] = []
        self.inspect: Callable[[], Mapping[str, Any]] = lambda: {"Running": False, "ExitCode": 137}

    def exec_create(self, *_: Any, **__: Any) -> Mapping[str, str]:
        self._starts -= 1
        if self._starts < 0:
            response = requests.Response()
            response.status_code = 409
            raise docker.errors.APIError("the container is not running", response)
        return {"Id": "1"}

    def exec_start(self, *_: Any, **__: Any) -> Any:
        ours, theirs = socket.socketpair()
        if self._stays_open:
            self._ends.append(theirs)
        else:
            theirs.close()
        reader = SimpleNamespace(peek=bytes, close=lambda: None)
        response = SimpleNamespace(raw=SimpleNamespace(_fp=SimpleNamespace(fp=reader)), close=lambda: None)
        return SimpleNamespace(_sock=ours, _response=response, close=lambda: None)

    def exec_inspect(self, _: str) -> Mapping[str, Any]:
        return self.inspect()

    def inspect_container(self, _: str) -> Mapping[str, Any]:
        return {"State": self._states.pop(0) if len(self._states) > 1 else self._states[0]}

    def close(self) -> None:
        for end in self._ends:
            end.close()


RUNS: Mapping[str, Any] = {"Running": True}
DEAD: Mapping[str, Any] = {"Running": False, "ExitCode": 137}


def run(api: Api) -> ExecResult:
    engine = Engine(api, "unix:///nowhere", is_podman=False)

    async def main() -> ExecResult:
        with anyio.fail_after(10):
            return await run_exec(engine, "c", ["sleep", "9"], stdin=b"", timeout_secs=5.0, limit=100)

    try:
        return anyio.run(main)
    finally:
        api.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_docker_exec, "WATCH_SECS", (0.02, 0.02))
    monkeypatch.setattr(_docker_exec, "DYING_SECS", 0.2)


@pytest.mark.parametrize("code", [126, 127, 137, 143])
def test_a_container_that_the_engine_believes_to_run(quick: None, code: int) -> None:
    """126: Docker says so where it "cannot exec in a stopped state", and has that as the command's output."""
    api = Api(states=[RUNS, RUNS, RUNS, DEAD])
    api.inspect = lambda: {"Running": False, "ExitCode": code}
    with pytest.raises(RolloutError, match=r"the container died \(exit code 137\)"):
        run(api)


def test_a_container_that_runs_nothing_any_more(quick: None) -> None:
    with pytest.raises(RolloutError, match="does not run commands any more"):
        run(Api(states=[RUNS]))


def test_a_second_command_that_dies_as_the_first_did(quick: None) -> None:
    with pytest.raises(RolloutError, match="the container died"):
        run(Api(states=[RUNS, RUNS, DEAD], starts=2))


def test_an_engine_that_ends_while_a_command_is_silent(quick: None) -> None:
    """One error, not a group of one: nobody looks for those."""
    api = Api(states=[RUNS], stays_open=True)

    def inspect() -> Mapping[str, Any]:
        raise requests.exceptions.ConnectionError("gone")

    api.inspect = inspect
    with pytest.raises(RolloutError, match=r"cannot look at a command: the container engine at .* gone"):
        run(api)
