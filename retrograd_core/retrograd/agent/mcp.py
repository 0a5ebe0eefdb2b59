"""MCP servers: their configuration, and their tools for all trajectories of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from retrograd_hookspecs import key


@attrs.frozen(kw_only=True)
class McpServer:
    """An MCP server: a local program, or a remote one by its URL."""

    name: str = key(doc="Server name.")
    command: tuple[str, ...] | None = key(
        None, doc="Local server command; this or `url`.", default_text="none", excluded_by="url"
    )
    url: str | None = key(None, doc="Address of a remote server (streamable HTTP).", default_text="none")
    env: Mapping[str, str] = key(factory=dict, doc="Environment of a local server.", secret=True)
    headers: Mapping[str, str] = key(factory=dict, doc="Headers of requests to a remote server.", secret=True)
    allowed_tools: tuple[str, ...] | None = key(
        None, doc="Tools that the model sees; `*` is a wildcard.", default_text="all"
    )
    denied_tools: tuple[str, ...] = key((), doc="Tools that it does not see; deny wins.", default_text="none")
    required: bool = key(True, doc="Fail the run if the server cannot connect.")
    stateless: bool = key(False, doc="Its calls do not depend on each other; needed with an environment.")
    tool_timeout_secs: float = key(30.0, above=0.0, unit="s", doc="Timeout of a call.")
    max_tool_result_bytes: int = key(65536, minimum=1, unit="bytes", doc="Cap on a tool result.")
    cwd: Path | None = key(None, doc="Working directory of a local server.", default_text="inherited")
    env_passthrough: tuple[str, ...] | None = key(
        None,
        doc="Names of the environment variables that a local server inherits; PATH and HOME always are.",
        default_text="all",
    )


def mcp_tools(servers: Sequence[McpServer], config: Any, base_dir: Path) -> Any:
    """The tools of all servers, those of `mcp.json` files included; None without any."""
    if not servers and config is None:
        return None
    raise NotImplementedError
