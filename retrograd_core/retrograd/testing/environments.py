"""Contract of an environment: `check_environment(make, scenario, actions)` raises `AssertionError` where it
is broken."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from retrograd_hookspecs import Environment, EnvironmentProvider, RolloutError, Scenario, Score, ToolSpec

from .sandboxes import check_metrics

Action = tuple[str, Mapping[str, Any]]
"""Name of a tool, and arguments that fit its schema."""
SEED = 7
SHORTEST_NAME = 6
"""Names of this host that are shorter may well occur by chance."""


@attrs.frozen(kw_only=True)
class Episode:
    """What a model, and a judge, saw of one world."""

    opening: str | None
    tools: tuple[ToolSpec, ...]
    observations: tuple[tuple[str, bool, float | None, bool], ...]
    score: Score
    state: str | None


async def check_environment(
    make: Callable[[], EnvironmentProvider],
    scenario: Scenario,
    actions: Sequence[Action],
    *,
    same_state: bool = True,
) -> Episode:
    """Check what every environment promises, with the scenario and actions in it; what was seen.

    The same actions are shown the same things, byte for byte, in one world after the other and in two at
    once, and nothing of the host; `same_state` says that this holds for the final state too. A world is
    closed twice, and at every stage: before `reset`, after it, in the midst of it. A provider can be prepared
    for no scenarios.

    Args:
        actions: names of tools and arguments; they may fail, and end where an episode is done.
    """
    provider = make()
    try:
        await provider.prepare([])
        for finding in await provider.prepare([scenario]):
            assert finding.level in ("ok", "note", "warning", "error"), finding
        json.dumps(dict(provider.signature()))
        await provider.warm_up(2)
        first = await play(provider, scenario, actions)
        for other in await _at_once(provider, scenario, actions):
            _compare(first, other, same_state=same_state)
        _check_catalogue(provider, first)
        await _check_closing(provider, scenario)
        check_metrics(provider.metrics())
        _compare(first, await play(provider, scenario, actions), same_state=same_state)
    finally:
        await provider.close()
        await provider.close()
    return first


async def play(provider: EnvironmentProvider, scenario: Scenario, actions: Sequence[Action]) -> Episode:
    """Play actions in a new world."""
    world = await provider.acquire(scenario)
    try:
        opening = await world.reset(scenario, SEED)
        tools = tuple(await world.tools())
        _check_tools(tools)
        observations = []
        for name, arguments in actions:
            assert name in {tool.name for tool in tools}, f"there is no tool {name!r}"
            result = await world.step(name, arguments)
            _check_text(result.observation)
            if result.reward is not None:
                assert math.isfinite(result.reward), result
            observations.append((result.observation, result.is_error, result.reward, result.done))
            if result.done:
                break
        score = await world.grade()
        check_score(score)
        state = await world.state()
    finally:
        await world.close()
        await world.close()
    return Episode(opening=opening, tools=tools, observations=tuple(observations), score=score, state=state)


def check_score(score: Score) -> None:
    """A final reward as an environment may give it."""
    assert score.kind in ("value", "missing", "error"), score
    assert isinstance(score.explanation, str), score
    if score.kind == "value":
        assert math.isfinite(score.value), score
    if score.kind == "error":
        assert score.explanation, "an error without a reason"


async def _at_once(
    provider: EnvironmentProvider, scenario: Scenario, actions: Sequence[Action]
) -> list[Episode]:
    import anyio

    episodes: list[Episode] = []

    async def one() -> None:
        episodes.append(await play(provider, scenario, actions))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        tasks.start_soon(one)
    return episodes


async def _check_closing(provider: EnvironmentProvider, scenario: Scenario) -> None:
    import anyio

    world = await provider.acquire(scenario)
    await world.close()
    await world.close()
    world = await provider.acquire(scenario)
    await world.reset(scenario, SEED)
    await world.close()
    for seconds in (0.0, 0.02, 0.3):
        worlds: list[Environment] = []
        with anyio.move_on_after(seconds):
            worlds.append(await provider.acquire(scenario))
            await worlds[0].reset(scenario, SEED)
        for world in worlds:
            await world.close()
            await world.close()
    world = await provider.acquire(scenario)
    await world.reset(scenario, SEED)
    await world.close()
    try:
        await world.reset(scenario, SEED)
    except RolloutError:
        return
    raise AssertionError("a closed world can be started")


def _check_tools(tools: Sequence[ToolSpec]) -> None:
    import jsonschema

    names = [tool.name for tool in tools]
    assert len(set(names)) == len(names), f"tools with the same name: {names}"
    for tool in tools:
        assert tool.name, "a tool without a name"
        schema = dict(tool.input_schema)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema.get("type") == "object", f"{tool.name}: arguments are an object"


def _check_catalogue(provider: EnvironmentProvider, episode: Episode) -> None:
    catalogue = provider.catalogue()
    if catalogue:
        sets = [tuple(tools) for tools in catalogue.values()]
        assert episode.tools in sets, "the tools of a world are no toolset of the catalogue"


def _check_text(text: str) -> None:
    """Nothing of the host."""
    places = {socket.gethostname(), str(Path.home()), os.getcwd()}
    for place in places:
        assert len(place) < SHORTEST_NAME or place not in text, f"{place!r} is shown to the model"


def _compare(first: Episode, other: Episode, *, same_state: bool) -> None:
    assert other.opening == first.opening, f"the opening differs: {first.opening!r}, {other.opening!r}"
    assert other.tools == first.tools, "the tools differ"
    for number, (one, two) in enumerate(zip(first.observations, other.observations, strict=True)):
        assert one == two, f"action {number}: the observation differs: {one!r}, {two!r}"
    scores = [(episode.score.kind, episode.score.value) for episode in (first, other)]
    assert scores[0] == scores[1], f"the scores differ: {scores}"
    states = [episode.state for episode in (first, other)]
    assert not same_state or states[0] == states[1], f"the state differs: {states}"
