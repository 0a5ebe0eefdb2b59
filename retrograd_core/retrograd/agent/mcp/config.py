"""Keys of `[[agent.mcp_servers]]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from retrograd_hookspecs import key


@attrs.frozen(kw_only=True)
class McpServer:
    """One `[[agent.mcp_servers]]`; in Python `McpServer(name="calc", command=("python3", "server.py"))`."""

    name: str = key(doc="Server name.")
    command: tuple[str, ...] | None = key(
        None, doc="Command of a local server; one of `command` and `url` is required.", excluded_by="url"
    )
    url: str | None = key(None, doc="Address of a remote server (streamable HTTP).")
    env: Mapping[str, str] = key(
        factory=dict, doc="Environment variables of a local server.", secret=True, default_text="none"
    )
    headers: Mapping[str, str] = key(
        factory=dict, doc="Headers of every request to a remote server.", secret=True, default_text="none"
    )
    allowed_tools: tuple[str, ...] | None = key(
        None, doc="Tools that the model sees; `*` is a wildcard.", default_text="all"
    )
    denied_tools: tuple[str, ...] = key(
        (), doc="Tools that the model does not see; deny wins.", default_text="none"
    )
    required: bool = key(True, doc="Fail the run if the server cannot connect.")
    stateless: bool = key(False, doc="Must be true when an environment is declared.")
    tool_timeout_secs: float = key(30.0, above=0.0, doc="Deadline of a call.", unit="seconds")
    max_tool_result_bytes: int = key(65536, minimum=1, doc="Cap on a tool result.", unit="bytes")
    cwd: Path | None = key(None, doc="Working directory of a local server.", default_text="inherited")
    env_passthrough: tuple[str, ...] | None = key(
        None,
        doc="Names of the environment variables a local server inherits; `PATH` and `HOME` always are.",
        default_text="all",
    )

    @name.validator
    def _is_named(self, attribute: Any, value: str) -> None:
        if not value.strip():
            raise ValueError("a server needs a name")

    @command.validator
    def _has_an_address(self, attribute: Any, value: tuple[str, ...] | None) -> None:
        if not value and self.url is None:
            raise ValueError("give command (a local server) or url (a remote one)")
        if value and self.url is not None:
            raise ValueError("give command or url, not both")
        if value and not value[0]:
            raise ValueError("the name of the program is empty")

    @url.validator
    def _is_http(self, attribute: Any, value: str | None) -> None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"must begin with http:// or https://, got {value!r}")

    @env.validator
    def _is_for_a_local_server(self, attribute: Any, value: Mapping[str, str]) -> None:
        if value and self.url:
            raise ValueError("applies to a local server (command), not to url")

    @headers.validator
    def _is_for_a_remote_server(self, attribute: Any, value: Mapping[str, str]) -> None:
        if value and self.command:
            raise ValueError("applies to a remote server (url), not to command")
