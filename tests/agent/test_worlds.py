"""The life of environments: whatever happens to a trajectory, its world is closed once, and no other one
notices."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from retrograd.agent import world as world_module
from retrograd.agent.arguments import check_schema, fitted, validate_arguments
from retrograd.agent.play import Played
from retrograd.agent.stage import Part
from retrograd.interrupts import StopRequestedError
from retrograd_hookspecs import ConfigError, RolloutError, Score, StepResult, ToolSpec
from retrograd_plugins.chat_formats.qwen3_coder import Qwen3CoderFormat

from .stand_ins import SCENARIO, Echoes, Speaker, parts, play, play_one, spec, stage_of
from .support import call

SAY, END = call("say", text="hi"), call("end")
METHODS = ("acquire", "reset", "tools", "say", "grade", "state", "close")


def fails(error: Exception) -> Callable[[], Any]:
    def fault() -> Any:
        raise error

    return fault


def one_faulty(method: str, fault: Callable[[], Any]) -> Echoes:
    """The second of the worlds has a fault."""
    return Echoes(lambda number: {method: fault} if number == 1 else {})


@pytest.mark.parametrize("error", [RolloutError("the lamp is out"), KeyError("lamp"), TimeoutError("late")])
@pytest.mark.parametrize("method", METHODS)
def test_what_a_world_raises_costs_its_trajectory_alone(method: str, error: Exception) -> None:
    provider = one_faulty(method, fails(error))
    first, second, third = play(Speaker({-1: [SAY, END]}), provider, count=3)
    assert [one.reward.value for one in (first, third)] == [1.0, 1.0]
    for world in provider.worlds:
        assert world.closed == (0 if world is provider.worlds[1] and method == "acquire" else 1)
    if method in ("state", "close"):
        assert (second.failed, second.reward.value) == ("", 1.0)
    else:
        assert second.failed
        assert second.setup_failed == (method in ("acquire", "reset", "tools"))
    said = second.unclosed if method == "close" else second.failed
    if method != "state":
        assert str(error.args[0]) in said
    if method not in ("state",) and not isinstance(error, RolloutError):
        what = "step 'say'" if method == "say" else method
        assert said.startswith(f"the environment's {what} raised {type(error).__name__}: ")
        assert "(test_worlds.py:" in said


def test_a_state_that_the_judge_needs_must_be_there() -> None:
    faults = {"grade": lambda: Score(kind="missing"), "state": fails(RolloutError("gone"))}
    played = play_one([END], Echoes(lambda number: faults))
    assert played.failed == "gone"


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("say", "just a text", "the environment's step 'say' gave str, not StepResult"),
        ("say", StepResult(observation=None), "the environment's step 'say' gave NoneType, not a text"),  # type: ignore[arg-type]
        ("grade", 1.0, "the environment's grade gave float, not Score"),
        ("reset", {"text": "x"}, "the environment's reset gave dict, not a text"),
        ("tools", [{"name": "say"}], "the environment's tools gave dict, not ToolSpec"),
        ("tools", 5, "the environment's tools gave int, not Iterable"),
    ],
)
def test_results_of_the_wrong_kind(method: str, result: Any, message: str) -> None:
    assert play_one([SAY, END], Echoes(lambda number: {method: lambda: result})).failed == message


def test_rewards_that_are_no_numbers() -> None:
    nan = Score(kind="value", value=math.nan)
    played = play_one([SAY, END], Echoes(lambda number: {"grade": lambda: nan}))
    assert (played.reward.kind, played.failed) == ("error", "")
    assert played.reward.explanation == "the reward is nan, not a finite number"
    for reward, shown in ((math.inf, "inf"), ("1", "'1'")):
        step = StepResult(observation="", reward=reward)  # type: ignore[arg-type]
        played = play_one([SAY, END], Echoes(lambda number, step=step: {"say": lambda: step}))
        assert played.failed == f"the environment's step 'say' gave the reward {shown}, not a finite number"
        assert played.step_rewards == [], "a trajectory that is cut later would be trained on it"
    step = StepResult(observation="", reward=1e308)
    played = play_one([SAY, SAY, END], Echoes(lambda number: {"say": lambda: step}))
    assert (played.reward.kind, played.reward.explanation) == ("error", "the sum of the rewards is too large")


def test_a_close_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "CLOSE_SECONDS", 0.1)
    provider = one_faulty("close", lambda: anyio.sleep(60))
    started = time.monotonic()
    played = play(Speaker({-1: [SAY, END]}), provider, count=2)
    assert time.monotonic() - started < 20
    assert [one.unclosed for one in played] == ["", "it did not close within 0.1 s"]
    assert [one.reward.value for one in played] == [1.0, 1.0]


class Stop:
    """Asks a run to stop once a world has come to a method."""

    def __init__(self, provider: Echoes, method: str) -> None:
        self._provider = provider
        self._method = method

    def __call__(self) -> None:
        if any(self._method in world.log for world in self._provider.worlds):
            raise StopRequestedError


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_stops_closes_all_worlds_before_it_goes_on(method: str) -> None:
    """Close takes its time, and is not interrupted itself."""
    closed: list[float] = []

    async def slow_close() -> None:
        await anyio.sleep(0.3)
        closed.append(time.monotonic())

    def faults(number: int) -> dict[str, Callable[[], Any]]:
        return {method: lambda: anyio.sleep(60), "close": slow_close}

    provider = Echoes(faults)
    speaker = Speaker({-1: [SAY, END]})
    stage = stage_of(speaker, provider, check=Stop(provider, method))
    with pytest.raises(StopRequestedError):
        stage.play(parts(4))
    expected = 0 if method == "acquire" else 4
    assert len(closed) == expected
    assert [world.closed for world in provider.worlds] == [1 if expected else 0] * 4
    assert speaker.ended.total() == 4
    stage.close()
    stage.close()
    assert provider.log == ["close"]


def test_a_run_that_stops_while_the_model_writes() -> None:
    provider = Echoes()
    stage = stage_of(Speaker({-1: [SAY, END]}, lambda n: 60), provider, check=Stop(provider, "tools"))
    with pytest.raises(StopRequestedError):
        stage.play(parts(3))
    assert [world.closed for world in provider.worlds] == [1, 1, 1]
    stage.close()


class Bug(Speaker):
    """A policy that breaks in a turn of trajectory 1."""

    async def generate(self, request: Any, session: object = None) -> Any:
        if request.stream >> 12 == 1 and len(self.requests) > 3:
            raise ZeroDivisionError("in the engine")
        return await super().generate(request, session)


def test_what_is_no_fault_of_a_world_ends_the_run_and_closes_all_worlds() -> None:
    provider = Echoes()
    stage = stage_of(Bug({-1: [SAY] * 6}, lambda n: 0.01), provider)
    with pytest.raises(ZeroDivisionError, match="in the engine"):
        stage.play(parts(4))
    assert [world.closed for world in provider.worlds] == [1] * 4
    stage.close()


@pytest.mark.parametrize("awaits", range(12))
def test_cancelled_at_every_await(awaits: int) -> None:
    """Each method awaits once; the trajectory is cancelled in the n-th of these awaits."""
    count = itertools.count()
    scopes: list[anyio.CancelScope] = []

    async def step() -> None:
        if next(count) == awaits:
            scopes[0].cancel()
        await anyio.lowlevel.checkpoint()

    provider = Echoes(lambda number: dict.fromkeys((*METHODS, "end"), step))
    speaker = Speaker({0: [SAY, SAY, END]})
    stage = stage_of(speaker, provider)

    async def one() -> Played | None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            return await stage.player.play(SCENARIO, 0, 0)
        return None

    played = anyio.run(one)
    cancelled = awaits < 8
    assert (played is None) == cancelled
    world = provider.worlds[0]
    assert world.closed == (0 if awaits == 0 else 1)
    assert world.log[-1] == ("acquire" if awaits == 0 else "close")
    assert speaker.ended.total() == 1


def test_members_of_a_group_meet_one_world() -> None:
    provider = Echoes()
    stage = stage_of(Speaker({-1: [END]}), provider)
    stage.play(parts(3))
    for number in (3, 4):
        stage.play([Part(scenario=SCENARIO, member=number - 3, stream=number)])
    stage.close()
    seeds = [world.seed for world in provider.worlds]
    assert seeds[0] == seeds[1] == seeds[2] != seeds[3] == seeds[4]


def test_latencies_change_nothing() -> None:
    """Neither the order in which tools answer, nor how many are in play at once."""

    def once(delay: Callable[[int], float], at_once: int) -> list[Played]:
        def faults(number: int) -> dict[str, Callable[[], Any]]:
            return {"say": lambda: anyio.sleep(delay(number))}

        stage = stage_of(Speaker({-1: [SAY, SAY + SAY, call("nope"), END]}), Echoes(faults))
        played, _ = stage.play(parts(6), at_once=at_once)
        stage.close()
        return played

    plain = once(lambda n: 0.0, 6)
    for delay, at_once in ((lambda n: 0.02 * (6 - n), 6), (lambda n: 0.02 * (n % 3), 2), (lambda n: 0.0, 1)):
        for first, second in zip(plain, once(delay, at_once), strict=True):
            assert first.trajectory.tokens == second.trajectory.tokens
            assert first.trajectory.messages == second.trajectory.messages
            assert first.reward == second.reward


def test_a_warm_up_that_fails_ends_nothing() -> None:
    class Cold(Echoes):
        async def warm_up(self, count: int) -> None:
            raise RolloutError("no fuel")

    provider = Cold()
    stage = stage_of(Speaker({-1: [END]}), provider)
    stage.warm_up(4)
    assert stage.play(parts(1))[0][0].reward.value == 0.0
    stage.warm_up(4)
    stage.close()
    assert provider.log == ["close"]


class Servers:
    """Shared tools."""

    def __init__(self, *specs: ToolSpec, fault: Callable[[], Any] | None = None) -> None:
        self._specs = specs
        self._fault = fault
        self.closed = 0

    async def open(self) -> Sequence[Any]:
        return []

    def specs(self) -> Sequence[ToolSpec]:
        return self._specs

    def origin(self, name: str) -> str:
        return "MCP server 'shouting'"

    def signature(self) -> dict[str, Any]:
        return {}

    async def call(self, name: str, arguments: Any) -> StepResult:
        if self._fault is not None:
            self._fault()
        return StepResult(observation=f"{name} {dict(arguments)}")

    async def close(self) -> None:
        self.closed += 1


def test_shared_tools_stand_behind_those_of_the_world() -> None:
    servers = Servers(spec("shout", text="string"))
    stage = stage_of(Speaker({-1: [call("shout", text="x"), END]}), Echoes(), tools=servers)
    [played] = stage.play(parts(1))[0]
    stage.close()
    assert [tool["function"]["name"] for tool in played.trajectory.tools] == ["say", "end", "shout"]
    assert played.trajectory.messages[1].content == "shout {'text': 'x'}"
    assert servers.closed == 1


def test_a_server_that_breaks_costs_its_trajectory() -> None:
    servers = Servers(spec("shout", text="string"), fault=fails(OSError("pipe")))
    stage = stage_of(Speaker({0: [call("shout", text="x")], 1: [END]}), Echoes(), tools=servers)
    first, second = stage.play(parts(2))[0]
    stage.close()
    assert first.failed.startswith("the tool 'shout' raised OSError: pipe")
    assert second.reward.kind == "value"


def test_two_tools_of_one_name() -> None:
    stage = stage_of(Speaker({0: [END]}), Echoes(), tools=Servers(spec("say")))
    assert stage.play(parts(1))[0][0].failed == (
        "the tool 'say' is offered by the environment and by MCP server 'shouting'"
    )
    stage.close()

    class Told(Echoes):
        def catalogue(self) -> dict[str, Sequence[ToolSpec]]:
            return {"default": [spec("say")]}

    stage = stage_of(Speaker({0: [END]}), Told(), tools=Servers(spec("say")))
    with pytest.raises(ConfigError) as refused:
        stage.open([SCENARIO])
    assert "MCP server 'shouting': its tool 'say' is one of the environment's toolset 'default', too" in str(
        refused.value
    )
    stage.close()


def test_provider_and_servers_are_both_closed() -> None:
    class Stuck(Echoes):
        async def close(self) -> None:
            raise OSError("busy")

    servers = Servers()
    stage = stage_of(Speaker({}), Stuck(), tools=servers)
    stage.open([])
    with pytest.raises(OSError, match="busy"):
        stage.close()
    assert servers.closed == 1


def test_what_the_provider_refuses_is_raised_as_it_is() -> None:
    class Strict(Echoes):
        async def prepare(self, scenarios: Any) -> Any:
            raise TimeoutError("no answer")

    stage = stage_of(Speaker({}), Strict())
    with pytest.raises(TimeoutError, match="no answer"):
        stage.open([])
    stage.close()


def schema(**keys: Any) -> ToolSpec:
    return ToolSpec(name="f", description="", input_schema={"type": "object", **keys})


def test_a_schema_that_is_wrong() -> None:
    with pytest.raises(RolloutError, match=r"'f' has an input schema that is wrong: properties\.a\.type"):
        check_schema(schema(properties={"a": {"type": "text"}}))


@pytest.mark.parametrize(
    "reference", ["http://127.0.0.1:9/never.json", "#/$defs/nothing", "file:///etc/passwd"]
)
def test_nothing_that_a_schema_refers_to_is_fetched(reference: str) -> None:
    with pytest.raises(RolloutError, match="the input schema of the tool 'f' cannot be used"):
        validate_arguments(schema(properties={"a": {"$ref": reference}}), {"a": 1})


def test_arguments_that_are_wrong() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    anything = schema(properties={"a": {}})
    assert (
        validate_arguments(anything, {"a": deep})
        == "the arguments of f are wrong: they are nested too deeply"
    )
    long = validate_arguments(schema(properties={"a": {"type": "number"}}), {"a": "x" * 100_000})
    assert long is not None
    assert len(long) < 400
    wanted = schema(properties={"a": {"type": "integer"}}, required=["a", "b"], additionalProperties=False)
    assert validate_arguments(wanted, {"a": "1", "c": 2}) == (
        "the arguments of f are wrong: 'b' is a required property;"
        " Additional properties are not allowed ('c' was unexpected);"
        " a: '1' is not of type 'integer'"
    )


def test_a_format_without_types_leaves_the_reading_to_the_schema() -> None:
    texts = {"a": "007.0", "b": '{"x":  1}', "c": "5", "d": "True", "e": "2"}
    written = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    [read] = (
        Qwen3CoderFormat().parse(f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>").tool_calls
    )
    assert dict(read.arguments) == {"a": "007.0", "b": {"x": 1}, "c": 5, "d": True, "e": 2}
    text = {"type": "string"}
    wanted = schema(
        properties={
            **dict.fromkeys("ab", text),
            "c": {"type": ["string", "null"]},
            "d": {"$ref": "#/$defs/text"},
            "e": {},
        },
        **{"$defs": {"text": text}},
    )
    assert dict(fitted(wanted, read)) == {**texts, "e": 2}
    assert fitted(schema(properties={"c": {"type": "integer"}}), read)["c"] == 5
    assert fitted(schema(properties={"c": {"type": "array"}}), read)["c"] == 5


def test_a_world_whose_schema_is_wrong_fails_its_setup(tmp_path: Path) -> None:
    bad = [schema(properties={"a": {"type": "text"}})]
    played = play_one([END], Echoes(lambda number: {"tools": lambda: bad}))
    assert played.setup_failed
    assert "input schema that is wrong" in played.failed


def test_a_configuration_error_of_the_world_costs_its_trajectory() -> None:
    error = ConfigError([])
    assert play_one([END], Echoes(lambda number: {"reset": fails(error)})).setup_failed
