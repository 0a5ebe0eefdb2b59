"""Worlds of a server with the five routes of the user documentation.

`GET /tools`, `POST /reset`, `POST /step`, `GET /state/{id}`, `POST /close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import anyio
import attrs

from retrograd.agent.scenarios import scenario_record
from retrograd.agent.tools import cap_text
from retrograd_hookspecs import RolloutError, Scenario, Score, StepResult, ToolSpec

from ._http_client import HttpClient, Reply
from ._http_results import as_json, reward_of, step_result, text_of, tool_specs

_LOST = frozenset({404, 410})
_FULL = frozenset({429, 503})
_REFUSED = frozenset({400, 409, 413, 422})
"""Statuses that say that the call was wrong, which the model is told."""
_LATE_SECS = 10.0
"""How long the answer to a reset is waited for once nobody wants it any more."""
NO_REWARD = Score(kind="missing", explanation="the environment server gave no final reward")


@attrs.define(eq=False, kw_only=True)
class RoutesWorld:
    """One episode. `place` waits for a place on a full server; `release` gives it back."""

    client: HttpClient
    specs: Sequence[ToolSpec]
    max_result_bytes: int
    place: Callable[[], Awaitable[None]]
    release: Callable[[], None]
    _id: str = ""
    _asking: asyncio.Task[Reply] | None = None
    _answered: anyio.Event = attrs.field(factory=anyio.Event)
    _state: str | None = None
    _reward: float | None = None
    _rewarded: bool = False
    _ended: bool = False
    _closed: bool = False

    async def reset(self, scenario: Scenario, seed: int) -> str | None:
        """Start the episode."""
        request = {"scenario": scenario_record(scenario), "seed": seed}
        while (reply := await self._ask_for_world(request)).status in _FULL:
            await self.place()
        content = _object(reply, "POST /reset")
        self._take_id(content)
        if not self._id:
            raise RolloutError(f"POST /reset: the answer has no env_id: {reply.shown()}")
        observation = content.get("observation")
        if observation is None:
            return None
        return cap_text(text_of(observation)[0], self.max_result_bytes)

    async def _ask_for_world(self, request: Mapping[str, Any]) -> Reply:
        """Ask in a task of its own: if the trajectory is given up meanwhile, the answer is still needed, for
        it names the session that has to be closed."""
        self._asking = asyncio.create_task(self.client.post("/reset", request, repeat=True))
        self._answered = anyio.Event()
        self._asking.add_done_callback(lambda _: self._answered.set())
        await self._answered.wait()
        asked, self._asking = self._asking, None
        return asked.result()

    def _take_id(self, content: Any) -> None:
        env_id = content.get("env_id") if isinstance(content, Mapping) else None
        if isinstance(env_id, str | int) and not isinstance(env_id, bool):
            self._id = str(env_id)

    async def _late_id(self) -> None:
        """The id of a session that was still being made when the trajectory was given up."""
        asked, self._asking = self._asking, None
        if asked is None:
            return
        with anyio.move_on_after(_LATE_SECS):
            await self._answered.wait()
        if not asked.done():
            asked.cancel()
        elif not asked.cancelled() and asked.exception() is None and asked.result().ok:
            self._take_id(asked.result().json("POST /reset"))

    async def tools(self) -> Sequence[ToolSpec]:
        """The server's."""
        return self.specs

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """One call; never sent twice."""
        call = {"name": name, "arguments": dict(arguments)}
        reply = await self.client.post("/step", {"env_id": self._id, "call": call})
        if reply.status in _LOST:
            raise RolloutError(f"POST /step: the session is lost: {reply.status}: {reply.words()}")
        if reply.status in _REFUSED:
            return step_result(
                reply.words(), is_error=True, reward=None, done=False, limit=self.max_result_bytes
            )
        content = _object(reply, "POST /step")
        if "result" not in content:
            raise RolloutError(f"POST /step: the answer has no result: {reply.shown()}")
        text, failed = text_of(content["result"])
        reward = reward_of(content.get("reward"), "POST /step")
        self._rewarded = self._rewarded or reward is not None
        failed = failed or content.get("is_error") is True
        return step_result(
            text, is_error=failed, reward=reward, done=content.get("done"), limit=self.max_result_bytes
        )

    async def grade(self) -> Score:
        """The reward of the final state, if no step gave one: `{"reward": …}`."""
        await self._end()
        if self._rewarded or self._reward is None:
            return NO_REWARD
        return Score(kind="value", value=self._reward, explanation="reward of the final state")

    async def state(self) -> str | None:
        """The final state for the judge."""
        await self._end()
        return self._state

    async def close(self) -> None:
        """Tell the server, which may be gone."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._late_id()
            if self._id:
                await self.client.post("/close", {"env_id": self._id})
        except RolloutError:
            pass  # the episode is over either way
        finally:
            self.release()

    async def _end(self) -> None:
        """Read the final state, once."""
        if self._ended:
            return
        self._ended = True
        reply = await self.client.get(f"/state/{quote(self._id, safe='')}")
        if reply.status in _LOST:
            return
        if not reply.ok:
            raise RolloutError(f"GET /state: the server answered {reply.status}: {reply.words()}")
        text = reply.body.decode("utf-8", errors="replace")
        try:
            content = reply.json("GET /state")
        except RolloutError:
            content = text  # a state may be any text
        if isinstance(content, Mapping):
            self._reward = reward_of(content.get("reward"), "GET /state")
            content = content.get("state", content)
        if content is not None:
            shown = content if isinstance(content, str) else as_json(content)
            self._state = cap_text(shown, self.max_result_bytes)


def route_tools(reply: Reply) -> tuple[ToolSpec, ...]:
    """The tools that a server answers `GET /tools` with. Raises `RolloutError`."""
    if not reply.ok:
        raise RolloutError(f"GET /tools: the server answered {reply.status}: {reply.words()[:300]}")
    return tool_specs(reply.json("GET /tools"), "GET /tools")


def _object(reply: Reply, what: str) -> Mapping[str, Any]:
    if not reply.ok:
        raise RolloutError(f"{what}: the server answered {reply.status}: {reply.words()[:300]}")
    content = reply.json(what)
    if not isinstance(content, Mapping):
        raise RolloutError(f"{what}: the answer is no JSON object: {reply.shown()}")
    return content
