"""Trajectories without a model: a speaker that says what it is told, and worlds that tell what was done to
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np

from retrograd.agent.play import STREAMS_PER_TRAJECTORY, Limits, Played, Player
from retrograd.agent.stage import Part, Stage
from retrograd.conversation import ConversationEncoder
from retrograd.engine.generation import Completion, GenerationRequest
from retrograd_hookspecs import (
    AuditFinding,
    Environment,
    SamplingParams,
    Scenario,
    Score,
    StepResult,
    ToolSpec,
)
from tests.datasets import standins

TOKENIZER = standins.chatml()
FORMAT = standins.StandInFormat()
STOP = TOKENIZER.id("<|im_end|>")
SCENARIO = Scenario(id="one", user="Go.")


class Speaker:
    """Says `turns[trajectory][turn]`; `seconds` is how long the turns of a trajectory take."""

    def __init__(
        self, turns: Mapping[int, Sequence[str]], seconds: Callable[[int], float] = lambda trajectory: 0.0
    ) -> None:
        self._turns = turns
        self._seconds = seconds
        self.requests: list[GenerationRequest] = []
        self.sessions: Counter[object] = Counter()
        self.ended: Counter[object] = Counter()

    async def generate(self, request: GenerationRequest, session: object = None) -> Completion:
        self.requests.append(request)
        self.sessions[session] += 1
        trajectory, turn = divmod(request.stream, STREAMS_PER_TRAJECTORY)
        await anyio.sleep(self._seconds(trajectory))
        said = self._turns.get(trajectory, self._turns.get(-1, ()))
        ids = [*TOKENIZER.encode(said[turn], special=True), STOP][: request.params.max_new_tokens]
        return Completion(
            tokens=np.array(ids, np.int32),
            logp=np.full(len(ids), -1.0),
            finish="stop" if ids[-1] == STOP else "length",
        )

    def end_session(self, session: object) -> None:
        self.ended[session] += 1


def spec(name: str, **properties: str) -> ToolSpec:
    """A tool."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    return ToolSpec(name=name, description="", input_schema=schema)


class EchoWorld:
    """`say` gives its text back, `end` ends the episode. `faults[method]` is called when a method begins."""

    def __init__(self, faults: Mapping[str, Callable[[], Any]]) -> None:
        self._faults = faults
        self.log: list[str] = []
        self.seed = -1
        self.said: list[str] = []

    async def _begin(self, name: str) -> Any:
        self.log.append(name)
        fault = self._faults.get(name)
        result = fault() if fault is not None else None
        return await result if hasattr(result, "__await__") else result

    async def reset(self, scenario: Scenario, seed: int) -> str | None:
        self.seed = seed
        opening: str | None = await self._begin("reset")
        return opening

    async def tools(self) -> Sequence[ToolSpec]:
        own: Sequence[ToolSpec] | None = await self._begin("tools")
        return own or (spec("say", text="string"), spec("end"))

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        result: StepResult | None = await self._begin(name)
        if result is not None:
            return result
        if name == "end":
            return StepResult(observation="ended", done=True)
        self.said.append(arguments["text"])
        return StepResult(observation=arguments["text"])

    async def grade(self) -> Score:
        score: Score | None = await self._begin("grade")
        return score or Score(kind="value", value=float(len(self.said)))

    async def state(self) -> str | None:
        await self._begin("state")
        return "|".join(self.said)

    async def close(self) -> None:
        await self._begin("close")

    @property
    def closed(self) -> int:
        """How often it was closed."""
        return self.log.count("close")


class Echoes:
    """A provider of `EchoWorld`; `faults(number)` are those of the world with a number."""

    def __init__(self, faults: Callable[[int], Mapping[str, Callable[[], Any]]] = lambda number: {}) -> None:
        self._faults = faults
        self.worlds: list[EchoWorld] = []
        self.log: list[str] = []

    async def prepare(self, scenarios: Sequence[Scenario]) -> Sequence[AuditFinding]:
        return []

    async def acquire(self, scenario: Scenario) -> Environment:
        world = EchoWorld(self._faults(len(self.worlds)))
        self.worlds.append(world)
        await world._begin("acquire")
        return world

    def catalogue(self) -> Mapping[str, Sequence[ToolSpec]]:
        return {}

    def signature(self) -> Mapping[str, Any]:
        return {}

    async def warm_up(self, count: int) -> None:
        self.log.append("warm_up")

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        self.log.append("close")


def player(speaker: Any, *, seed: int = 0, system_suffix: str = "", **limits: Any) -> Player:
    """A player whose model is `speaker`."""
    values = {"max_new_tokens_per_turn": 200, "max_trajectory_tokens": 2000, **limits}
    return Player(
        speaker=speaker,
        encoder=ConversationEncoder(TOKENIZER, standins.template("qwen2.5"), FORMAT),
        chat_format=FORMAT,
        stop_ids=TOKENIZER.stop_ids,
        limits=Limits(**values),
        sampling=SamplingParams(seed=seed),
        system_suffix=system_suffix,
    )


def stage_of(
    speaker: Any, provider: Any = None, *, tools: Any = None, check: Any = lambda: None, **keys: Any
) -> Stage:
    """A stage without a policy."""
    return Stage(player=player(speaker, **keys), policy=None, provider=provider, tools=tools, check=check)


def parts(count: int, scenario: Scenario = SCENARIO, **keys: Any) -> list[Part]:
    """A group."""
    return [Part(scenario=scenario, member=n, stream=n, **keys) for n in range(count)]


def play(
    speaker: Any, provider: Any = None, *, count: int = 1, grade_cut: bool = False, **keys: Any
) -> list[Played]:
    """Play a group to its end."""
    stage = stage_of(speaker, provider, **keys)
    try:
        stage.open([SCENARIO])
        return stage.play(parts(count, grade_cut=grade_cut))[0]
    finally:
        stage.close()


def play_one(turns: Sequence[str], provider: Any = None, **keys: Any) -> Played:
    """Play one trajectory."""
    [played] = play(Speaker({0: turns}), provider, **keys)
    return played
