"""`http` against a real server with the five routes, well-behaved and not."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from retrograd_hookspecs import ConfigError, Environment, RolloutError, Scenario, Score, StepResult
from retrograd_plugins.environments import _http_client
from retrograd_plugins.environments._http_provider import HttpProvider, Places
from retrograd_plugins.environments.http import HttpEnvironment

from .http_server import TOOLS, Worlds, times, worlds

T = TypeVar("T")
TASK = Scenario(id="sum-5", user="Reach 5.", metadata={"env": {"target": 5}})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worlds]:
    monkeypatch.setattr(_http_client, "_FIRST_WAIT_SECS", 0.01)
    with worlds() as running:
        yield running


def use(server: Worlds, body: Callable[[HttpProvider], Awaitable[T]], **options: Any) -> T:
    """Use a provider, and close it."""

    async def run() -> T:
        config = HttpEnvironment(**{"base_url": server.url, **options})
        provider = HttpProvider(config, Path.cwd())
        try:
            return await body(provider)
        finally:
            await provider.close()
            await provider.close()

    return anyio.run(run)


def episode(
    server: Worlds, *calls: tuple[str, Mapping[str, Any]], scenario: Scenario = TASK, **options: Any
) -> tuple[str | None, list[StepResult], Score, str | None]:
    """Opening observation, results, grade and state of an episode."""

    async def body(provider: HttpProvider) -> Any:
        world: Environment = await provider.acquire(scenario)
        try:
            opening = await world.reset(scenario, 11)
            results = [await world.step(name, arguments) for name, arguments in calls]
            return opening, results, await world.grade(), await world.state()
        finally:
            await world.close()
            await world.close()

    found: tuple[str | None, list[StepResult], Score, str | None] = use(server, body, **options)
    return found


def one_step(server: Worlds, **options: Any) -> StepResult:
    """The result of one step."""
    return episode(server, ("add", {"number": 1}), **options)[1][0]


def test_an_episode_from_tools_to_close(server: Worlds) -> None:
    async def body(provider: HttpProvider) -> None:
        assert provider.catalogue() == {}
        [finding] = await provider.prepare([TASK])
        assert finding.level == "ok"
        assert finding.message == f"{server.url} speaks the five routes; tools: add, stop"
        [specs] = provider.catalogue().values()
        assert [(spec.name, spec.description) for spec in specs] == [
            ("add", "Add to the sum."),
            ("stop", "Stop."),
        ]
        assert specs[0].input_schema == TOOLS[0]["input_schema"]
        assert list(provider.signature()) == ["add", "stop"]
        world = await provider.acquire(TASK)
        assert await world.reset(TASK, 11) == "the sum is 0, seed 11"
        assert list(await world.tools()) == list(specs)
        assert await world.step("add", {"number": 2}) == StepResult(observation="the sum is 2", reward=0.0)
        assert await world.step("add", {"number": 3}) == StepResult(
            observation="the sum is 5", reward=1.0, done=True
        )
        assert (await world.grade()).kind == "missing"  # the rewards came with the steps
        assert await world.state() == '{"sum": 5}'
        await world.close()
        assert set(provider.metrics()) == {"acquire_ms_mean", "capacity"}

    use(server, body)
    assert server.sums == {}
    assert len(server.closed) == 1
    sent = dict(server.requests)["/reset"]
    assert sent == {"scenario": {"id": "sum-5", "user": "Reach 5.", "metadata": TASK.metadata}, "seed": 11}
    steps = [content for path, content in server.requests if path == "/step"]
    assert steps[0]["call"] == {"name": "add", "arguments": {"number": 2}}


def test_what_the_model_sees_holds_no_id_of_the_session(server: Worlds) -> None:
    calls = (("add", {"number": 2}), ("stop", {}))
    first, second = episode(server, *calls), episode(server, *calls)
    assert first == second
    assert all(env_id not in str(first) for env_id in server.closed)


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        ("text", StepResult(observation="text")),
        (None, StepResult(observation="")),
        ({"b": 1, "a": "é"}, StepResult(observation='{"b": 1, "a": "é"}')),
        ([1, 2], StepResult(observation="[1, 2]")),
        ({"content": "no", "is_error": True}, StepResult(observation="no", is_error=True)),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "image", "data": "…"}], "isError": False},
            StepResult(observation="a\n[image]"),
        ),
    ],
)
def test_results_of_every_shape(server: Worlds, result: Any, seen: StepResult) -> None:
    server.faults["/step"] = lambda content: (200, {"result": result})
    assert one_step(server) == seen


def test_half_a_character_in_a_catalogue(server: Worlds) -> None:
    """JSON can hold what no tokenizer can read, and no signature can hash."""
    tool = b'{"name": "add", "description": "a\\ud800b", "input_schema": {"title": "\\udfff"}}'
    server.faults["/tools"] = lambda content: (200, b'{"tools": [%s]}' % tool)

    async def body(provider: HttpProvider) -> dict[str, Any]:
        await provider.prepare([TASK])
        return dict(provider.signature())

    replaced = "\N{REPLACEMENT CHARACTER}"
    assert use(server, body) == {
        "add": {"description": f"a{replaced}b", "input_schema": {"title": replaced}},
    }


def test_a_call_that_the_server_refuses_is_an_observation(server: Worlds) -> None:
    server.faults["/step"] = times(1, 422, {"detail": "number must be even"})
    _, [refused, after], _, _ = episode(server, ("add", {"number": 1}), ("add", {"number": 2}))
    assert refused == StepResult(observation="number must be even", is_error=True)
    assert after.observation == "the sum is 2"


@pytest.mark.parametrize("status", [404, 410])
def test_a_lost_session_costs_the_trajectory(server: Worlds, status: int) -> None:
    server.faults["/step"] = times(1, status, {"error": "expired"})
    with pytest.raises(RolloutError, match=f"the session is lost: {status}: expired"):
        one_step(server)
    assert server.count("/close") == 1
    assert one_step(server).observation == "the sum is 1"


@pytest.mark.parametrize(
    ("route", "status", "body", "words"),
    [
        ("/step", 500, "boom", "POST /step: the server answered 500: boom"),
        ("/step", 200, b"<html>", "POST /step: the answer is no JSON"),
        ("/step", 200, [], "POST /step: the answer is no JSON object"),
        ("/step", 200, {"reward": 1}, "POST /step: the answer has no result"),
        ("/step", 200, b'{"result": "", "reward": NaN}', "NaN is not JSON"),
        ("/step", 200, b'{"result": "", "reward": 1e999}', "the reward inf is no finite number"),
        ("/step", 200, {"result": "", "reward": "1"}, "the reward '1' is no finite number"),
        ("/step", 0, b"", "the connection failed"),
        ("/reset", 200, {}, "POST /reset: the answer has no env_id"),
        ("/reset", 400, {"error": "no such task"}, "POST /reset: the server answered 400: no such task"),
        ("/state", 500, {"error": "boom"}, "GET /state: the server answered 500: boom"),
        ("/tools", 200, {"tools": [{}]}, "tool number 0 has no name"),
        ("/tools", 200, {"tools": [{"name": "a"}, {"name": "a"}]}, "two tools with the name 'a'"),
        ("/tools", 200, {"tools": [{"name": "a b"}]}, "a model cannot call a tool with the name 'a b'"),
    ],
)
def test_a_broken_server_costs_the_trajectory(
    server: Worlds, route: str, status: int, body: Any, words: str
) -> None:
    server.faults[route] = lambda content: (status, body)
    with pytest.raises(RolloutError) as error:
        one_step(server, protocol="retrograd")
    assert words in str(error.value)


def test_only_what_is_safe_is_asked_again(server: Worlds) -> None:
    for route in ("/tools", "/reset", "/state"):
        server.faults[route] = times(2, 502, "bad gateway")
    assert one_step(server).observation == "the sum is 1"
    assert [server.count(route) for route in ("/tools", "/reset", "/state")] == [3, 3, 3]
    server.faults["/step"] = times(1, 503, "busy")
    with pytest.raises(RolloutError, match="503: busy"):
        one_step(server)
    assert server.count("/step") == 2
    server.faults["/reset"] = times(1, 0, b"")
    assert one_step(server).observation == "the sum is 1"


def test_deadlines(server: Worlds) -> None:
    given_up = threading.Event()
    server.faults["/step"] = lambda content: (200, {"late": given_up.wait(60)})
    try:
        with pytest.raises(RolloutError, match=r"POST .*/step: no answer within 0.3 seconds"):
            one_step(server, request_timeout_secs=0.3)
    finally:
        given_up.set()
    assert server.count("/step") == 1


def test_observations_are_capped(server: Worlds) -> None:
    server.faults["/step"] = lambda content: (200, {"result": "é" * 1_000_000})
    server.faults["/state"] = lambda content: (200, {"long": "x" * 1_000_000})
    _, [seen], _, state = episode(server, ("add", {"number": 1}), max_result_bytes=100)
    assert seen.observation == "é" * 50 + "\n[cut: longer than 100 bytes]"
    assert state is not None
    assert state.endswith("[cut: longer than 100 bytes]")


def test_the_final_state_may_hold_the_reward(server: Worlds) -> None:
    server.faults["/state"] = lambda content: (200, {"state": "all done", "reward": 0.5})
    _, _, grade, state = episode(server, ("stop", {}))
    assert (grade.kind, grade.value, state) == ("value", 0.5, "all done")
    _, _, grade, _ = episode(server, ("add", {"number": 1}))
    assert grade.kind == "missing"  # or it would count twice
    server.faults["/state"] = lambda content: (404, "")
    assert episode(server, ("stop", {}))[2:] == (
        Score(kind="missing", explanation="the environment server gave no final reward"),
        None,
    )


def test_a_full_server_is_waited_for(server: Worlds) -> None:
    server.places = 3
    server.retry_after = "0.01"

    async def body(provider: HttpProvider) -> None:
        results: list[str] = []

        async def play(number: int) -> None:
            world = await provider.acquire(TASK)
            try:
                await world.reset(TASK, number)
                await anyio.sleep(0.1)
                results.append((await world.step("add", {"number": 1})).observation)
            finally:
                await world.close()

        async with anyio.create_task_group() as tasks:
            for number in range(12):
                tasks.start_soon(play, number)
        assert results == ["the sum is 1"] * 12

    use(server, body)
    assert server.count("/reset") > 12  # some were refused first
    assert server.sums == {}


def test_places_are_halved_and_come_back() -> None:
    async def body() -> list[int]:
        places = Places(8, patience_secs=1.0)
        holders = [object() for _ in range(9)]
        for holder in holders[:8]:
            await places.take(holder)
        limits = [places.limit]

        async def refuse() -> None:
            await places.refused(holders[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refuse)
            await anyio.sleep(0)
            limits.append(places.limit)
            for holder in holders[1:5]:
                places.give_back(holder)  # with the fourth, a place is free again
        limits.append(places.limit)
        for holder in holders:
            places.give_back(holder)
            places.give_back(holder)
        for _ in range(40):
            await places.take(holders[8])
            places.give_back(holders[8])
        return [*limits, places.limit]

    assert anyio.run(body) == [8, 4, 5, 8]


def test_a_server_that_stays_full_is_given_up(server: Worlds) -> None:
    server.places = 0
    server.retry_after = "0.01"
    with pytest.raises(RolloutError, match=r"has had no place for 0\.2 seconds"):
        one_step(server, request_timeout_secs=0.2)


def test_connections_are_limited(server: Worlds) -> None:
    def slow(content: Mapping[str, Any]) -> None:
        time.sleep(0.05)

    server.faults["/step"] = slow

    async def body(provider: HttpProvider) -> None:
        async def play() -> None:
            world = await provider.acquire(TASK)
            await world.reset(TASK, 1)
            await world.step("add", {"number": 1})
            await world.close()

        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(play)

    use(server, body, pool_size=3)
    assert server.most <= 3
    assert server.count("/tools") == 1, "worlds that begin at once ask once"
    assert len(server.closed) == 12


def test_headers_are_sent_with_their_variables(server: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV_TOKEN", "t0k")
    headers = {"Authorization": "Bearer ${ENV_TOKEN}", "X-Run": "7"}
    one_step(server, headers=headers)
    assert {(h["authorization"], h["x-run"]) for h in _lowered(server)} == {("Bearer t0k", "7")}
    with pytest.raises(ConfigError, match="the environment variable NO_SUCH_TOKEN is not set"):
        one_step(server, headers={"Authorization": "${NO_SUCH_TOKEN}"})


def _lowered(server: Worlds) -> list[dict[str, str]]:
    return [{name.lower(): value for name, value in headers.items()} for headers in server.headers]


def test_a_server_that_is_gone_at_the_end_is_left_in_peace(server: Worlds) -> None:
    server.faults["/close"] = lambda content: (500, "boom")
    assert one_step(server).observation == "the sum is 1"
    server.faults["/close"] = lambda content: (0, b"")
    assert one_step(server).observation == "the sum is 1"


@pytest.mark.parametrize("route", ["/reset", "/step"])
def test_a_trajectory_that_is_given_up_closes_its_world(server: Worlds, route: str) -> None:
    def slow(content: Mapping[str, Any]) -> None:
        time.sleep(1.0)

    server.faults[route] = slow

    async def body(provider: HttpProvider) -> None:
        world = await provider.acquire(TASK)
        with anyio.move_on_after(0.5) as scope:
            try:
                await world.reset(TASK, 1)
                await world.step("add", {"number": 1})
            finally:
                with anyio.CancelScope(shield=True):
                    await world.close()

        assert scope.cancelled_caught

    use(server, body, pool_size=1)
    assert (server.sums, len(server.closed)) == ({}, 1)


def test_a_server_that_is_not_there_or_speaks_something_else(server: Worlds) -> None:
    async def prepare(provider: HttpProvider) -> None:
        await provider.prepare([])

    with pytest.raises(RolloutError, match=r"GET http://127.0.0.1:9/tools: no connection: .* \(4 times\)"):
        use(server, prepare, base_url="http://127.0.0.1:9")
    server.faults["/tools"] = lambda content: (404, "nothing here")
    server.faults["/health"] = lambda content: (404, "")
    with pytest.raises(RolloutError, match="speaks neither protocol: GET /tools: the server answered 404"):
        use(server, prepare)
    with pytest.raises(RolloutError, match="GET /tools: the server answered 404: nothing here"):
        use(server, prepare, protocol="retrograd")


@pytest.mark.parametrize("wrong", ["127.0.0.1:80", "ftp://x", "http://", "http://x/?a=1"])
def test_an_address_that_is_none(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"must "):
        HttpEnvironment(base_url=wrong)
