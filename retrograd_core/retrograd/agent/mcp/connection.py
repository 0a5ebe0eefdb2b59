"""One MCP server, connected. Its session lives in a task of its own, for a task group has to be left by the
task that entered it; calls come from any task of the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from retrograd_hookspecs import RolloutError, StepResult, ToolSpec

from .config import McpServer
from .process import ServerLog, server_process
from .results import step_result

if TYPE_CHECKING:
    from mcp import Client

CONNECT_SECS = 30.0
"""Deadline of starting a server, of its handshake and of its list of tools, all together."""
_MAX_PAGES = 1000


class Connection:
    """A session with a server, from `open` to `close`; used once."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.specs: tuple[ToolSpec, ...] = ()
        """All tools of the server, sorted by name."""
        self._log = ServerLog()
        self._client: Client | None = None
        self._ready = anyio.Event()
        self._failure = ""
        self._stop = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._task: asyncio.Task[None] | None = None
        self._broken = False

    @property
    def usable(self) -> bool:
        """False once the server is gone."""
        return self._client is not None and not self._broken

    async def open(self) -> None:
        """Connect. Raises `RolloutError` with what the server said."""
        self._task = asyncio.create_task(self._live(), name=f"mcp {self.server.name}")
        try:
            await self._ready.wait()
        except BaseException:
            await self.close()
            raise
        if self._failure:
            raise RolloutError(self._failure)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Call a tool. Raises `RolloutError` if the server is gone or does not keep to the protocol."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        client, server = self._client, self.server
        if client is None:
            raise await self._gone("the connection is closed")
        try:
            with anyio.fail_after(server.tool_timeout_secs):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            text = f"{name} did not answer within {server.tool_timeout_secs:g} seconds"
            return StepResult(observation=text, is_error=True)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise await self._gone(error.message) from error
            return StepResult(observation=f"the server refused the call: {error.message}", is_error=True)
        except Exception as error:
            raise await self._gone(_words(error)) from error
        return step_result(result, server.max_tool_result_bytes)

    async def close(self) -> None:
        """End the session and the server's process; may be called more than once."""
        self._stop.set()
        if self._scope is not None and not self._ready.is_set():
            self._scope.cancel()  # it is still connecting
        if self._task is not None:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._task])

    async def _gone(self, what: str) -> RolloutError:
        """The error of a call, with the last words of the server."""
        self._broken = True
        await self.close()
        return RolloutError(f"the MCP server {self.server.name!r} is gone: {what}{self._log.text()}")

    async def _live(self) -> None:
        """The task: connect, stay connected until `close`, disconnect."""
        from mcp import Client

        logging.getLogger("mcp").addHandler(logging.NullHandler())  # the SDK would print tracebacks
        stage, failure = "connecting", ""
        try:
            # The scope holds the whole session, for scopes have to nest; its deadline is that of connecting.
            with anyio.CancelScope(deadline=anyio.current_time() + CONNECT_SECS) as scope:
                self._scope = scope
                if self._stop.is_set():
                    return
                async with contextlib.AsyncExitStack() as stack:
                    transport = await self._transport(stack)
                    client = await stack.enter_async_context(Client(transport, cache=None))
                    stage = "listing its tools"
                    self.specs = await _list_tools(client)
                    scope.deadline = math.inf
                    self._client = client
                    self._ready.set()
                    await self._stop.wait()
                    self._client = None
            if scope.cancelled_caught and not self._stop.is_set():
                failure = f"{stage} took longer than {CONNECT_SECS:g} seconds"
        except Exception as error:
            failure = f"{stage} failed: {_words(error)}"
        finally:
            self._client = None
            self._broken = True
            self._failure = f"the MCP server {self.server.name!r}: {failure or 'given up'}{self._log.text()}"
            self._ready.set()

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        if self.server.url is None:
            return server_process(self.server, self._log)
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(CONNECT_SECS, read=None)  # calls have a deadline of their own
        headers = dict(self.server.headers)
        client = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
        return streamable_http_client(self.server.url, http_client=client, max_sse_event_size=None)


async def _list_tools(client: Client) -> tuple[ToolSpec, ...]:
    """All pages of the server's list."""
    version = client.server_info.version if client.server_info is not None else ""
    specs: list[ToolSpec] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        specs += [
            ToolSpec(
                name=tool.name,
                description=tool.description or "",
                input_schema=dict(tool.input_schema),
                version=version,
            )
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if not cursor:
            return tuple(sorted(specs, key=lambda spec: spec.name))
    raise RolloutError(f"its list of tools has more than {_MAX_PAGES} pages")


def _words(error: BaseException) -> str:
    """What an error says; the first of a group."""
    parts: Sequence[BaseException] = getattr(error, "exceptions", ())
    while parts:
        error = parts[0]
        parts = getattr(error, "exceptions", ())
    return str(error) or type(error).__name__
