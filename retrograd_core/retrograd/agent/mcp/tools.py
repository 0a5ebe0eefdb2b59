"""The tools of all MCP servers of a run, shared by its trajectories."""

from __future__ import annotations

import collections
import fnmatch
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs

from retrograd.agent.variables import expand
from retrograd.config.messages import did_you_mean
from retrograd_hookspecs import AuditFinding, ConfigError, Problem, RolloutError, StepResult, ToolSpec

from .config import McpServer
from .connection import Connection
from .files import load_mcp_config

_CHECK = "MCP servers"
_NO_NAME_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def mcp_tools(
    servers: Sequence[McpServer], files: Path | Iterable[Path] | None = None, base_dir: Path | None = None
) -> McpTools | None:
    """The shared tools of a run; None if it has no servers. Nothing is started before `McpTools.open`.

    Args:
        files: `mcp.json` files.
        base_dir: directory of the configuration, against which their paths resolve.

    Raises:
        ConfigError: a file is wrong, two servers have one name, or a variable is not set.
    """
    base = base_dir or Path.cwd()
    given = [files] if isinstance(files, str | Path) else list(files or ())
    problems: list[Problem] = []
    found = [(server, "agent.mcp_servers") for server in servers]
    disabled: list[str] = []
    for file in given:
        try:
            loaded, off = load_mcp_config(base / file)
        except ConfigError as error:
            problems += error.problems
            continue
        found += [(server, str(file)) for server in loaded]
        disabled += off
    places: dict[str, str] = {}
    for server, place in found:
        if server.name in places:
            message = f"the server {server.name!r} is defined already, in {places[server.name]}"
            problems.append(Problem(where=place, message=message, hint="give it another name"))
        places.setdefault(server.name, place)
    expanded = [_expanded(server, place, base, problems) for server, place in found]
    if problems:
        raise ConfigError(problems)
    return McpTools(expanded, disabled=disabled) if expanded or disabled else None


def _expanded(server: McpServer, place: str, base: Path, problems: list[Problem]) -> McpServer:
    """With the variables in `env` and `headers` of a TOML replaced; a file has had its own replaced."""
    if place != "agent.mcp_servers":
        return server
    changed: dict[str, dict[str, str]] = {"env": {}, "headers": {}}
    for key in changed:
        for name, text in getattr(server, key).items():
            try:
                changed[key][name] = expand(text, os.environ, base)
            except ValueError as error:
                problems.append(
                    Problem(where=f"{place}, server {server.name!r}", key=f"{key}.{name}", message=str(error))
                )
    return attrs.evolve(server, env=changed["env"], headers=changed["headers"])


@attrs.define(eq=False)
class _Server:
    """A server that connected, and how it is reached."""

    config: McpServer
    connection: Connection
    specs: tuple[ToolSpec, ...]
    """What it offered when the run began: what the model is told throughout."""
    lock: anyio.Lock = attrs.field(factory=anyio.Lock)


class McpTools:
    """Tools of MCP servers: `retrograd.agent.play.SharedTools`.

    Opened and closed once a run, inside one asyncio event loop. Calls may come from many trajectories at a
    time. A server that dies costs the trajectories that wait for it; the next call starts it again.
    """

    def __init__(self, servers: Sequence[McpServer], *, disabled: Sequence[str] = ()) -> None:
        self.servers = tuple(servers)
        self._disabled = tuple(disabled)
        self._open: list[_Server] = []
        self._routes: dict[str, tuple[_Server, str]] = {}
        self._specs: tuple[ToolSpec, ...] = ()

    async def open(self) -> Sequence[AuditFinding]:
        """Connect all servers at once; what was found, one line a server.

        Raises:
            RolloutError: a required server, or every server, cannot be reached, with what each of them said.
            ConfigError: a filter names no tool, or two tools cannot be told apart.
        """
        outcomes = await self._connect()
        findings = [
            AuditFinding(level="note", check=_CHECK, message=f"{name}: disabled in its file")
            for name in self._disabled
        ]
        failures: list[str] = []
        for server, outcome in zip(self.servers, outcomes, strict=True):
            if isinstance(outcome, Connection):
                self._open.append(_Server(server, outcome, outcome.specs))
            elif server.required:
                failures.append(outcome)
            else:
                findings.append(AuditFinding(level="warning", check=_CHECK, message=f"left out: {outcome}"))
        try:
            if failures:
                raise RolloutError("\n".join(failures))
            if self.servers and not self._open:
                raise RolloutError("\n".join(["no MCP server can be reached", *map(str, outcomes)]))
            findings += self._name_tools()
        except BaseException:
            await self.close()
            raise
        return findings

    def specs(self) -> Sequence[ToolSpec]:
        """By server as configured, then by name."""
        return self._specs

    def toolsets(self) -> Mapping[str, Sequence[ToolSpec]]:
        """The tools that the model sees, by server."""
        found: dict[str, list[ToolSpec]] = {server.config.name: [] for server in self._open}
        for spec in self._specs:
            found[self._routes[spec.name][0].config.name].append(spec)
        return found

    def origin(self, name: str) -> str:
        """`MCP server 'calc'`."""
        return f"MCP server {self._routes[name][0].config.name!r}"

    def signature(self) -> Mapping[str, Any]:
        """What must be equal for a checkpoint to be resumed: what the model sees of the tools."""
        tools = {
            spec.name: {"description": spec.description, "input_schema": dict(spec.input_schema)}
            for spec in self._specs
        }
        return {"order": list(tools), "tools": tools} if tools else {}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Call a tool. Raises `RolloutError` if its server is gone and does not come back."""
        server, own_name = self._routes[name]
        connection = await self._connection(server)
        return await connection.call(own_name, arguments)

    async def close(self) -> None:
        """End every session and process; may be called more than once."""
        servers, self._open = self._open, []
        await _close_all(server.connection for server in servers)

    async def _connect(self) -> list[Connection | str]:
        """All at once: a connection each, or why there is none."""
        outcomes: dict[int, Connection | str] = {}

        async def connect(number: int, server: McpServer) -> None:
            connection = Connection(server)
            try:
                await connection.open()
            except RolloutError as error:
                outcomes[number] = str(error)
            else:
                outcomes[number] = connection

        try:
            async with anyio.create_task_group() as tasks:
                for number, server in enumerate(self.servers):
                    tasks.start_soon(connect, number, server)
        except BaseException:
            await _close_all(found for found in outcomes.values() if isinstance(found, Connection))
            raise
        return [outcomes[number] for number in range(len(self.servers))]

    async def _connection(self, server: _Server) -> Connection:
        """The live connection of a server; a new one if it died."""
        async with server.lock:
            if not server.connection.usable:
                await server.connection.close()
                server.connection = Connection(server.config)
                await server.connection.open()
            return server.connection

    def _name_tools(self) -> list[AuditFinding]:
        """Filter, then give every tool a name of its own: `server__tool` where several servers have one."""
        findings: list[AuditFinding] = []
        problems: list[Problem] = []
        kept = [(server, self._filtered(server, problems)) for server in self._open]
        counts = collections.Counter(spec.name for _, specs in kept for spec in specs)
        named: list[ToolSpec] = []
        for server, specs in kept:
            for spec in specs:
                clashes = counts[spec.name] > 1
                prefix = f"{_NO_NAME_CHARACTER.sub('_', server.config.name)}__" if clashes else ""
                name = prefix + spec.name
                if name in self._routes:
                    other = self.origin(name)
                    message = f"the tool {name!r} is offered by {other} too"
                    hint = "add it to the denied_tools of one of them, or give the server another name"
                    problems.append(_problem(server, message, hint))
                elif not _TOOL_NAME.fullmatch(name):
                    problems.append(
                        _problem(
                            server,
                            f"a model cannot call a tool with the name {name!r}",
                            "add it to denied_tools, or give the server a shorter name",
                        )
                    )
                self._routes[name] = (server, spec.name)
                named.append(attrs.evolve(spec, name=name))
            shown = f"{server.config.name}: {len(specs)} of {len(server.specs)} tools"
            findings.append(AuditFinding(level="ok", check=_CHECK, message=shown))
        if problems:
            raise ConfigError(problems)
        for name in sorted(name for name, count in counts.items() if count > 1):
            message = f"several servers have a tool {name!r}: the model sees SERVER__{name}"
            findings.append(AuditFinding(level="note", check=_CHECK, message=message))
        self._specs = tuple(named)
        return findings

    def _filtered(self, server: _Server, problems: list[Problem]) -> list[ToolSpec]:
        config = server.config
        names = [spec.name for spec in server.specs]
        for key, patterns in (("allowed_tools", config.allowed_tools), ("denied_tools", config.denied_tools)):
            for pattern in patterns or ():
                if not fnmatch.filter(names, pattern):
                    hint = did_you_mean(pattern, names) or f"its tools: {', '.join(names)}"
                    problems.append(_problem(server, f"{pattern!r} is no tool of the server", hint, key))
        return [
            spec
            for spec in server.specs
            if (config.allowed_tools is None or _matches(spec.name, config.allowed_tools))
            and not _matches(spec.name, config.denied_tools)
        ]


async def _close_all(connections: Iterable[Connection]) -> None:
    """All at once, whatever is cancelled meanwhile."""
    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(connection.close)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _problem(server: _Server, message: str, hint: str = "", key: str = "") -> Problem:
    return Problem(where=f"MCP server {server.config.name!r}", key=key, message=message, hint=hint)
