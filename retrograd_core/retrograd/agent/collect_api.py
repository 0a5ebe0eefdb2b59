"""Trajectories of a model behind an OpenAI-compatible endpoint: the same worlds and tools, no tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from retrograd.chat_api import ChatClient, RequestError
from retrograd.chat_endpoint import Endpoint
from retrograd.chat_replies import shown
from retrograd.records import RecordError, parse_object
from retrograd.tool_prompt import observed
from retrograd_hookspecs import (
    ConfigError,
    Message,
    ParsedTurn,
    Problem,
    RolloutError,
    SamplingParams,
    ToolCall,
)

from .play import STREAMS_PER_TRAJECTORY, Limits, Played, Player
from .trajectory import Trajectory, call_id

MAX_RETRIES = 4
CONCURRENCY = 8
"""Requests under way at once, and trajectories in play."""
_LIMIT_KEYS = ("max_tokens", "max_completion_tokens")
"""Names of the limit on a reply: the one that all servers know, and the one that OpenAI's reasoning models
want."""
_REFUSES_ALL = (401, 403, 404)
"""Statuses that every further request would meet."""


@attrs.define(eq=False)
class ApiTrajectory(Trajectory):
    """Messages alone."""

    def start(self) -> None:
        """Nothing is rendered."""

    def framing(self, observations: Sequence[Message], most: int | None = None) -> tuple[int, ...]:
        """Append observations."""
        self.messages += observations
        return ()

    def add(self, content: str, calls: Sequence[ToolCall]) -> ParsedTurn:
        """Append a turn. Calls get ids that count up."""
        count = sum(len(message.tool_calls) for message in self.messages)
        named = tuple(attrs.evolve(call, id=call_id(count + n)) for n, call in enumerate(calls))
        self.messages.append(Message(role="assistant", content=content, tool_calls=named))
        return ParsedTurn(content=content, tool_calls=named)


class ApiModel:
    """Writes turns. `first_wait_secs` is the wait before the first retry of a request."""

    def __init__(self, endpoint: Endpoint, *, where: str, first_wait_secs: float = 0.5) -> None:
        self._client = ChatClient(endpoint, first_wait_secs=first_wait_secs)
        self._where = where
        self._limit_key = 0

    @property
    def counts(self) -> Mapping[str, float]:
        """What was spent: requests, retries, tokens."""
        return self._client.counts

    def end_session(self, session: object) -> None:
        """Nothing is kept for a trajectory."""

    async def turn(self, trajectory: Trajectory, *, budget: int, seed: int | None) -> Mapping[str, Any]:
        """The choice that the model made for the next turn.

        Raises: `ConfigError` if the endpoint refuses all requests; `RolloutError` if it refused this one, or
        cannot be reached.
        """
        messages = [
            message_record(observed(message)) for message in (*trajectory.opening, *trajectory.messages)
        ]
        fields: dict[str, Any] = {"tools": list(trajectory.tools) or None, "seed": seed}
        while True:
            name = _LIMIT_KEYS[self._limit_key]
            try:
                return await self._client.complete(messages, **fields, **{name: budget})
            except RequestError as error:
                if error.status in _REFUSES_ALL or 300 <= error.status < 400:
                    raise ConfigError([Problem(where=self._where, message=str(error))]) from error
                if error.status == 400 and _LIMIT_KEYS[1] in str(error) and name == _LIMIT_KEYS[0]:
                    self._limit_key = 1
                    continue
                raise RolloutError(str(error)) from error

    async def close(self) -> None:
        """Close connections."""
        await self._client.close()


@attrs.frozen(kw_only=True, eq=False)
class ApiPlayer(Player):
    """Plays scenarios with a model behind an endpoint. `seeded`: requests carry seeds of their own."""

    model: ApiModel
    seeded: bool = False

    def begin(self, opening: tuple[Message, ...]) -> Trajectory:
        """A trajectory of messages."""
        return ApiTrajectory(self.encoder, self.chat_format, (), opening)

    async def speak(self, played: Played, stream: int, session: object) -> ParsedTurn | None:
        """Ask for the next turn. A call whose arguments are no JSON ends the trajectory: its trace could not
        be used."""
        trajectory = cast(ApiTrajectory, played.trajectory)
        seed = self._seed(stream, played.turns) if self.seeded else None
        budget = self.limits.max_new_tokens_per_turn
        choice = await self.model.turn(trajectory, budget=budget, seed=seed)
        played.turns += 1
        message = choice.get("message")
        message = message if isinstance(message, dict) else {}
        finish = choice.get("finish_reason")
        content = _text(message.get("content"))
        if finish == "length":
            trajectory.add(content, ())
            played.truncated = "max_new_tokens_per_turn"
            return None
        if finish == "content_filter" or (message.get("refusal") and not content):
            said = shown(message.get("refusal") or "content_filter")
            raise RolloutError(f"the endpoint withheld the reply: {said}")
        try:
            calls = _calls(message.get("tool_calls"))
        except RecordError as error:
            trajectory.add(content, ())
            played.failed_calls += 1
            played.truncated = f"a call could not be read: {error.message}"
            return None
        return trajectory.add(content, calls)

    def _seed(self, stream: int, turn: int) -> int:
        numbers = [self.sampling.seed, stream * STREAMS_PER_TRAJECTORY + turn]
        return int(np.random.default_rng(numbers).integers(1 << 31))


def api_player(
    model: ApiModel, *, limits: Limits, seed: int, seeded: bool, system_suffix: str = ""
) -> ApiPlayer:
    """A player without a tokenizer, template and chat format."""
    nothing = cast(Any, None)
    return ApiPlayer(
        speaker=cast(Any, model),
        encoder=nothing,
        chat_format=nothing,
        stop_ids=frozenset(),
        limits=limits,
        sampling=SamplingParams(max_new_tokens=limits.max_new_tokens_per_turn, seed=seed),
        system_suffix=system_suffix,
        model=model,
        seeded=seeded,
    )


def message_record(message: Message) -> dict[str, Any]:
    """A message in the shape of OpenAI's chat completions."""
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        record["content"] = message.content or None
        record["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                },
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        record["tool_call_id"] = message.tool_call_id
    return record


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _calls(value: Any) -> list[ToolCall]:
    """Calls of a reply. Raises: `RecordError`."""
    if not value:
        return []
    if not isinstance(value, list):
        raise RecordError("tool_calls is no array")
    return [_call(item) for item in value]


def _call(item: Any) -> ToolCall:
    function = item.get("function") if isinstance(item, dict) else None
    function = function if isinstance(function, dict) else {}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RecordError(f"a call names no function: {shown(item)}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = parse_object(arguments.encode("utf-8", "surrogatepass"))
    if not isinstance(arguments, dict):
        raise RecordError(f"the arguments of {name} are no object: {shown(arguments)}")
    return ToolCall(name=name, arguments=arguments)
