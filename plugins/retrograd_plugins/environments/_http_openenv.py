"""Worlds of an OpenEnv server: one WebSocket a session.

Over HTTP the server's `/reset` and `/step` know no sessions. Messages are `{"type", "data"}`: `reset`,
`step`, `state`, `mcp` and `close`; replies `observation`, `state`, `mcp`, or `error` with a code.
"""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import attrs

from retrograd.agent.tools import cap_text
from retrograd_hookspecs import RolloutError, Scenario, Score, StepResult, ToolSpec

from ._http_client import MAX_BODY_BYTES, HttpClient
from ._http_results import as_json, reward_of, step_result, text_of, tool_specs
from ._http_routes import NO_REWARD

ACT = "act"
"""Name of the tool that stands for an environment's one typed action."""
_HIDDEN = ("metadata", "reward", "done")
"""Keys of an observation that the model is not shown: what they hold is no part of the world."""
_CLOSE_SECS = 2.0


class CapacityError(RolloutError):
    """The server has no place for one more session."""


@attrs.frozen(kw_only=True)
class OpenEnvServer:
    """What is known of a server. `tools` are those of a session that was not reset; `action` is the schema of
    the typed action, None where the server has tools."""

    url: str
    headers: Mapping[str, str]
    connect_secs: float
    request_secs: float
    description: str = ""
    tools: tuple[ToolSpec, ...] = ()
    action: Mapping[str, Any] | None = None

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What a model can call."""
        if self.action is None:
            return self.tools
        return (ToolSpec(name=ACT, description=self.description, input_schema=self.action),)


class Session:
    """A WebSocket to a server, which has one environment behind it."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._socket: Any = None

    async def open(self) -> None:
        """Connect. Raises `RolloutError`."""
        import websockets
        from websockets.asyncio.client import connect

        server = self._server
        address = "ws" + server.url.removeprefix("http") + "/ws"
        try:
            self._socket = await connect(
                address,
                additional_headers=dict(server.headers),
                open_timeout=server.connect_secs,
                close_timeout=_CLOSE_SECS,
                max_size=MAX_BODY_BYTES,
                ping_interval=None,  # every message has a deadline of its own
            )
        except (OSError, TimeoutError, ssl.SSLError, websockets.WebSocketException) as error:
            raise RolloutError(f"{address}: no connection: {str(error) or type(error).__name__}") from error

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> tuple[str, Mapping[str, Any]]:
        """Send a message; type and data of the reply.

        Raises:
            CapacityError: the server is full.
            RolloutError: the session is lost, or the reply is none of the protocol.
        """
        import websockets

        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        try:
            with anyio.fail_after(self._server.request_secs):
                # A full server says so at once and closes: the reply is there although sending fails.
                with contextlib.suppress(websockets.ConnectionClosed):
                    await self._socket.send(json.dumps(message))
                raw = await self._socket.recv()
        except TimeoutError as error:
            raise RolloutError(
                f"{self._server.url}: no answer to {kind!r} within {self._server.request_secs:g} seconds"
            ) from error
        except websockets.WebSocketException as error:
            raise RolloutError(f"{self._server.url}: the session is lost at {kind!r}: {error}") from error
        return self._read(raw, kind)

    async def close(self) -> None:
        """Leave; the server may be gone."""
        import websockets

        socket, self._socket = self._socket, None
        if socket is None:
            return
        with contextlib.suppress(websockets.WebSocketException, OSError), anyio.move_on_after(_CLOSE_SECS):
            await socket.send(json.dumps({"type": "close"}))
        await socket.close()

    def _read(self, raw: str | bytes, asked: str) -> tuple[str, Mapping[str, Any]]:
        try:
            reply = json.loads(raw)
            kind, data = reply["type"], reply.get("data") or {}
        except (ValueError, TypeError, KeyError) as error:
            raise RolloutError(
                f"{self._server.url}: the answer to {asked!r} is no message: {raw[:200]!r}"
            ) from error
        if kind == "error":
            code = str(data.get("code", ""))
            said = f"{self._server.url}: {code}: {data.get('message', '')}"
            if code == "CAPACITY_REACHED":
                raise CapacityError(said)
            if code in ("FACTORY_ERROR", "SESSION_ERROR"):
                raise RolloutError(said)
        return str(kind), data


@attrs.define(eq=False, kw_only=True)
class OpenEnvWorld:
    """One episode. `place` waits for a place on a full server; `release` gives it back."""

    server: OpenEnvServer
    max_result_bytes: int
    place: Callable[[], Awaitable[None]]
    release: Callable[[], None]
    _session: Session | None = None
    _specs: tuple[ToolSpec, ...] = ()
    _state: str | None = None
    _reward: float | None = None
    _rewarded: bool = False
    _ended: bool = False
    _closed: bool = False

    async def reset(self, scenario: Scenario, seed: int) -> str | None:
        """Connect and start the episode with the keys of `metadata.env`."""
        given = {"seed": seed, "episode_id": f"{scenario.id}-{seed}", **scenario.env}
        kind, data = await self._reset(given)
        if kind != "observation":
            raise RolloutError(f"{self.server.url}: reset failed: {_words(data)}")
        self._specs = self.server.specs
        if self.server.action is None:
            self._specs = await list_tools(self._asked()) or self.server.tools
        text = observation_text(data)[0]
        return cap_text(text, self.max_result_bytes) if text else None

    async def _reset(self, given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        while True:
            self._session = Session(self.server)
            try:
                await self._session.open()
                return await self._session.ask("reset", given)
            except CapacityError:
                await self._session.close()
                self._session = None
                await self.place()

    async def tools(self) -> Sequence[ToolSpec]:
        """Those of the episode."""
        return self._specs

    async def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """One action."""
        action: dict[str, Any] = dict(arguments)
        if self.server.action is None:
            action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        kind, data = await self._asked().ask("step", action)
        if kind == "error":
            return step_result(
                _words(data), is_error=True, reward=None, done=False, limit=self.max_result_bytes
            )
        if kind != "observation":
            raise RolloutError(f"{self.server.url}: the answer to a step is of type {kind!r}")
        text, failed = observation_text(data)
        reward = reward_of(data.get("reward"), self.server.url)
        self._rewarded = self._rewarded or reward is not None
        return step_result(
            text, is_error=failed, reward=reward, done=data.get("done"), limit=self.max_result_bytes
        )

    async def grade(self) -> Score:
        """The reward of the final state, if no step gave one."""
        await self._end()
        if self._rewarded or self._reward is None:
            return NO_REWARD
        return Score(kind="value", value=self._reward, explanation="reward of the final state")

    async def state(self) -> str | None:
        """The final state for the judge, without the episode's id."""
        await self._end()
        return self._state

    async def close(self) -> None:
        """End the session."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._session is not None:
                await self._session.close()
        finally:
            self.release()

    def _asked(self) -> Session:
        if self._session is None:
            raise RolloutError("the world is not started")
        return self._session

    async def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        kind, data = await self._asked().ask("state")
        if kind != "state":
            return
        self._reward = reward_of(data.get("reward"), f"{self.server.url}: state")
        shown = {name: value for name, value in data.items() if name != "episode_id"}
        self._state = cap_text(as_json(shown), self.max_result_bytes) if shown else None


def observation_text(data: Mapping[str, Any]) -> tuple[str, bool]:
    """An observation for the model, and whether it is an error.

    A tool's result is its text; of a typed observation all fields but its metadata are shown, one text field
    alone as it is.
    """
    observation = data.get("observation")
    if not isinstance(observation, Mapping):
        return text_of(observation)
    if "tool_name" in observation:
        error = observation.get("error")
        if error is not None:
            return str(error.get("message", error)) if isinstance(error, Mapping) else str(error), True
        return text_of(observation.get("result"))
    shown = {name: value for name, value in observation.items() if name not in _HIDDEN}
    if len(shown) == 1:
        return text_of(next(iter(shown.values())))
    return (as_json(shown), False) if shown else ("", False)


async def list_tools(session: Session) -> tuple[ToolSpec, ...]:
    """The tools of a session; none if its environment has one typed action. No step of the episode."""
    call = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
    kind, data = await session.ask("mcp", call)
    result = data.get("result") if kind == "mcp" else None
    return tool_specs(result, "tools/list") if isinstance(result, Mapping) and result.get("tools") else ()


async def look_at(client: HttpClient, server: OpenEnvServer) -> OpenEnvServer:
    """The server with what it offers. Raises `RolloutError`."""
    session = Session(server)
    try:
        await session.open()
        tools = await list_tools(session)
    except CapacityError:
        # Somebody else holds the only place: the schema tells whether there is a typed action.
        tools = ()
    finally:
        await session.close()
    if tools:
        return attrs.evolve(server, tools=tools)
    reply = await client.get("/schema")
    schema = reply.json("GET /schema").get("action") if reply.ok else None
    if not isinstance(schema, Mapping):
        raise RolloutError(f"{server.url}: it has no tools, and /schema gives no action")
    return attrs.evolve(server, action=_action(schema), description=await _description(client))


def _action(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a typed action, without what is for programs only."""
    properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
    required = [name for name in schema.get("required", ()) if name != "metadata"]
    return {**schema, "type": "object", "properties": properties, "required": required}


async def _description(client: HttpClient) -> str:
    reply = await client.get("/metadata")
    found = reply.json("GET /metadata") if reply.ok else {}
    text = found.get("description") if isinstance(found, Mapping) else None
    return f"Act in the environment. {text}" if isinstance(text, str) and text else "Act in the environment."


def _words(data: Mapping[str, Any]) -> str:
    """What an error says; of a refused action, what is wrong with which field."""
    errors = data.get("errors")
    if not isinstance(errors, list):
        return str(data.get("message", ""))
    parts = []
    for error in errors:
        if isinstance(error, Mapping):
            place = ".".join(str(part) for part in error.get("loc", ()))
            parts.append(f"{place}: {error.get('msg', '')}" if place else str(error.get("msg", "")))
    return f"{data.get('message', '')}: {'; '.join(parts)}"
