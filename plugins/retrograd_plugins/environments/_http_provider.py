"""Worlds of the environment `http`: which protocol the server speaks, and how many sessions it can have."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from retrograd.agent.variables import expand
from retrograd_hookspecs import (
    AuditFinding,
    ConfigError,
    Environment,
    Problem,
    RolloutError,
    Scenario,
    ToolSpec,
)

from ._http_client import HttpClient
from ._http_openenv import OpenEnvServer, OpenEnvWorld, look_at
from ._http_routes import RoutesWorld, route_tools

if TYPE_CHECKING:
    from .http import HttpEnvironment

_SHORTEST_WAIT_SECS = 0.05
_LONGEST_WAIT_SECS = 2.0


class HttpProvider:
    """Implements `retrograd_hookspecs.EnvironmentProvider`. Used in one event loop."""

    def __init__(self, config: HttpEnvironment, base_dir: Path) -> None:
        self._config = config
        self._url = config.base_url.rstrip("/")
        self._headers = _headers(config.headers, base_dir)
        self._client: HttpClient | None = None
        self._connecting = anyio.Lock()
        self._places: Places | None = None
        self._routes: tuple[ToolSpec, ...] | None = None
        self._openenv: OpenEnvServer | None = None
        self._wait_ms: list[float] = []

    async def prepare(self, scenarios: Sequence[Scenario]) -> Sequence[AuditFinding]:
        """Find the server, its protocol and its tools. Raises `RolloutError` if it cannot be used."""
        await self._connect()
        names = ", ".join(spec.name for spec in self._specs())
        message = f"{self._url} speaks {self._protocol()}; tools: {names or 'none'}"
        findings = [AuditFinding(level="ok", check="environment", message=message)]
        if not names:
            findings.append(AuditFinding(level="warning", check="environment", message="it has no tools"))
        return findings

    async def acquire(self, scenario: Scenario) -> Environment:
        """A place for a world."""
        places = await self._connect()
        holder = object()
        started = time.perf_counter()
        await places.take(holder)
        self._wait_ms.append((time.perf_counter() - started) * 1e3)

        def release() -> None:
            places.give_back(holder)

        async def place() -> None:
            await places.refused(holder)

        if self._openenv is not None:
            return OpenEnvWorld(
                server=self._openenv,
                max_result_bytes=self._config.max_result_bytes,
                place=place,
                release=release,
            )
        assert self._client is not None
        return RoutesWorld(
            client=self._client,
            specs=self._routes or (),
            max_result_bytes=self._config.max_result_bytes,
            place=place,
            release=release,
        )

    def catalogue(self) -> Mapping[str, Sequence[ToolSpec]]:
        """The server's tools, once it was asked."""
        return {"http": self._specs()} if self._client is not None else {}

    def signature(self) -> Mapping[str, Any]:
        """What the model sees of the tools; a server may move."""
        return {
            spec.name: {"description": spec.description, "input_schema": dict(spec.input_schema)}
            for spec in self._specs()
        }

    async def warm_up(self, count: int) -> None:
        """Does nothing: a session is made when it is reset."""

    def metrics(self) -> Mapping[str, float]:
        """Time waiting for a place, and how many sessions the server is thought to have room for."""
        waits, self._wait_ms = self._wait_ms, []
        found = {"acquire_ms_mean": sum(waits) / len(waits)} if waits else {}
        if self._places is not None:
            found["capacity"] = float(self._places.limit)
        return found

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _connect(self) -> Places:
        async with self._connecting:  # or each of many worlds would find its own places
            return await self._connected()

    async def _connected(self) -> Places:
        if self._client is None:
            config = self._config
            client = HttpClient(
                self._url,
                headers=self._headers,
                connect_secs=config.connect_timeout_secs,
                request_secs=config.request_timeout_secs,
                pool_size=config.pool_size,
            )
            try:
                await self._find_protocol(client)
            except BaseException:
                await client.close()
                raise
            self._client = client
            self._places = Places(config.pool_size, patience_secs=config.request_timeout_secs)
        assert self._places is not None
        return self._places

    async def _find_protocol(self, client: HttpClient) -> None:
        protocol = self._config.protocol
        refused = ""
        if protocol != "openenv":
            reply = await client.get("/tools")  # a server that cannot be reached speaks no protocol at all
            try:
                self._routes = route_tools(reply)
                return
            except RolloutError as error:
                if protocol == "retrograd":
                    raise
                refused = str(error)
        if protocol == "auto":
            for path in ("/health", "/schema"):
                reply = await client.get(path)
                if not reply.ok:
                    raise RolloutError(
                        f"{self._url} speaks neither protocol: {refused}; GET {path}: {reply.status}"
                    )
        server = OpenEnvServer(
            url=self._url,
            headers=self._headers,
            connect_secs=self._config.connect_timeout_secs,
            request_secs=self._config.request_timeout_secs,
        )
        self._openenv = await look_at(client, server)

    def _protocol(self) -> str:
        return "OpenEnv's protocol" if self._openenv is not None else "the five routes"

    def _specs(self) -> tuple[ToolSpec, ...]:
        return self._openenv.specs if self._openenv is not None else self._routes or ()


class Places:
    """How many sessions may be open: halved when the server says that it is full, for it may have less room
    than `limit` or be slow to end a session; one more each time that as many went well.

    Args:
        patience_secs: how long a full server is waited for while no session of this run is open.
    """

    def __init__(self, limit: int, *, patience_secs: float) -> None:
        self._limiter = anyio.CapacityLimiter(limit)
        self._most = limit
        self._went_well = 0
        self._patience_secs = patience_secs
        self._alone_since: float | None = None
        self._wait_secs = _SHORTEST_WAIT_SECS

    @property
    def limit(self) -> int:
        """Sessions that may be open now."""
        return int(self._limiter.total_tokens)

    async def take(self, holder: object) -> None:
        """Wait for a place."""
        await self._limiter.acquire_on_behalf_of(holder)

    def give_back(self, holder: object) -> None:
        """Give a place back, if it is held."""
        if holder in self._limiter.statistics().borrowers:
            self._limiter.release_on_behalf_of(holder)
            self._alone_since = None
            self._wait_secs = _SHORTEST_WAIT_SECS
            self._went_well += 1
            if self._went_well >= self.limit:
                self._limiter.total_tokens = min(self.limit + 1, self._most)
                self._went_well = 0

    async def refused(self, holder: object) -> None:
        """The server was full for `holder`: lower the limit, and wait for another place.

        Raises:
            RolloutError: the server stays full although nobody of this run is there.
        """
        self._limiter.total_tokens = max(1, self.limit // 2)
        self._went_well = 0
        others = self._limiter.borrowed_tokens - 1
        now = time.monotonic()
        if others > 0:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self._patience_secs:
            raise RolloutError(
                f"the environment server has had no place for {self._patience_secs:g} seconds, although this"
                " run holds none: others use it"
            )
        self._limiter.release_on_behalf_of(holder)
        await anyio.sleep(self._wait_secs)
        self._wait_secs = min(self._wait_secs * 2, _LONGEST_WAIT_SECS)
        await self._limiter.acquire_on_behalf_of(holder)


def _headers(headers: Mapping[str, str], base_dir: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    problems: list[Problem] = []
    for name, text in headers.items():
        try:
            found[name] = expand(text, os.environ, base_dir)
        except ValueError as error:
            problems.append(
                Problem(
                    where="agent.environment", key=f"agent.environment.headers.{name}", message=str(error)
                )
            )
    if problems:
        raise ConfigError(problems)
    return found
