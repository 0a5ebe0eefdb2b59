"""`http` against real OpenEnv servers, of the package `openenv` in an environment of its own.

Environment: RETROGRAD_OPENENV, a virtual environment with `openenv` (without it one is made once, 480 MB).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from retrograd.cache import cache_dir
from retrograd_hookspecs import RolloutError, Scenario, Score, StepResult
from retrograd_plugins.environments._http_provider import HttpProvider
from retrograd_plugins.environments.http import HttpEnvironment

T = TypeVar("T")
START_SECS = 180.0


@pytest.fixture(scope="module")
def openenv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Address of the running server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("openenv") / "log"
    script = Path(__file__).with_name("openenv_server.py")
    with log.open("wb") as file:
        process = subprocess.Popen([_python(), script, str(port)], stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_SECS
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"the server does not start: {log.read_text()}"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def _python() -> Path:
    given = os.environ.get("RETROGRAD_OPENENV")
    directory = Path(given) if given else cache_dir() / "test-openenv"
    python = directory / "bin" / "python"
    if not python.exists():
        if given:
            pytest.fail(f"RETROGRAD_OPENENV={given} is no virtual environment; unset it to have one made")
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "openenv>=0.10,<0.11"], check=True)
    return python


def use(url: str, body: Callable[[HttpProvider], Awaitable[T]], **options: Any) -> T:
    """Use a provider, and close it."""

    async def run() -> T:
        provider = HttpProvider(HttpEnvironment(base_url=url, **options), Path.cwd())
        try:
            return await body(provider)
        finally:
            await provider.close()

    return anyio.run(run)


async def play(
    provider: HttpProvider, scenario: Scenario, *calls: tuple[str, Mapping[str, Any]]
) -> tuple[str | None, list[str], list[StepResult], Score, str | None]:
    """Opening, tools, results, grade and state of an episode."""
    world = await provider.acquire(scenario)
    try:
        opening = await world.reset(scenario, 5)
        names = [spec.name for spec in await world.tools()]
        results = [await world.step(name, arguments) for name, arguments in calls]
        return opening, names, results, await world.grade(), await world.state()
    finally:
        await world.close()


ECHO = Scenario(id="e1", user="Echo.", metadata={"env": {"level": 3}})
ECHO_CALLS = (
    ("echo", {"message": "hé"}),
    ("count", {"word": "abc"}),
    ("fail", {}),
    ("echo", {"message": "after"}),
)


def test_a_server_with_tools(openenv: tuple[str, Any]) -> None:
    async def body(provider: HttpProvider) -> Any:
        [finding] = await provider.prepare([ECHO])
        assert finding.message.endswith("speaks OpenEnv's protocol; tools: echo, count, fail")
        [specs] = provider.catalogue().values()
        assert specs[0].description == "Say a message again."
        assert specs[0].input_schema["properties"] == {"message": {"type": "string"}}
        return [await play(provider, ECHO, *ECHO_CALLS) for _ in range(2)]

    first, second = use(f"{openenv[0]}/echo", body)
    assert first == second
    opening, names, results, grade, state = first
    assert opening is None
    assert names == ["echo", "count", "fail"]
    assert results == [
        StepResult(observation="hé"),
        StepResult(observation='{"word":"abc","letters":3}'),
        StepResult(observation="Error calling tool 'fail': it went wrong", is_error=True),
        StepResult(observation="after"),
    ]
    assert grade.kind == "missing"
    assert state == '{"step_count": 4, "given": {"level": 3}, "seed": 5}'


def test_a_server_with_one_typed_action(openenv: tuple[str, Any]) -> None:
    scenario = Scenario(id="g1", user="Guess.", metadata={"env": {"secret": 3}})

    async def body(provider: HttpProvider) -> Any:
        await provider.prepare([scenario])
        [[act]] = provider.catalogue().values()
        assert (act.name, act.input_schema["required"]) == ("act", ["number"])
        assert list(act.input_schema["properties"]) == ["number"]
        calls = ({"number": 1}, {"number": "x"}, {"number": 1000}, {"number": 3})
        return await play(provider, scenario, *(("act", call) for call in calls))

    opening, _, results, grade, state = use(f"{openenv[0]}/guess", body)
    assert opening == "guess a number from 1 to 10"
    low, invalid, far, right = results
    assert low == StepResult(observation="larger", reward=0.0)
    assert invalid.is_error
    assert invalid.observation.startswith("Invalid message: number: Input should be a valid integer")
    assert far == StepResult(observation="the number is far too large", is_error=True)
    assert right == StepResult(observation="right", reward=1.0, done=True)
    assert grade.kind == "missing"
    assert state == '{"step_count": 3}'


@pytest.mark.parametrize(("path", "call"), [("echo", ECHO_CALLS[0]), ("guess", None)])
def test_a_full_server_is_shared(
    openenv: tuple[str, Any], path: str, call: tuple[str, Mapping[str, Any]] | None
) -> None:
    async def body(provider: HttpProvider) -> list[int]:
        played: list[int] = []

        async def one(number: int) -> None:
            scenario = Scenario(id=str(number), user="u")
            await play(provider, scenario, call or ("act", {"number": number}))
            played.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, number)
        return sorted(played)

    assert use(f"{openenv[0]}/{path}", body) == list(range(8))


def test_long_results_are_capped(openenv: tuple[str, Any]) -> None:
    async def body(provider: HttpProvider) -> Any:
        return await play(provider, ECHO, ("echo", {"message": "x" * 3_000_000}))

    results = use(f"{openenv[0]}/echo", body, max_result_bytes=50)[2]
    assert results[0].observation == "x" * 50 + "\n[cut: longer than 50 bytes]"


def test_a_server_that_dies_costs_the_trajectory(openenv: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = openenv

    async def body(provider: HttpProvider) -> None:
        world = await provider.acquire(ECHO)
        try:
            await world.reset(ECHO, 1)
            process.kill()
            await anyio.to_thread.run_sync(process.wait)
            with pytest.raises(RolloutError, match="the session is lost at 'step'"):
                await world.step("echo", {"message": "x"})
        finally:
            await world.close()

    use(f"{url}/echo", body)
