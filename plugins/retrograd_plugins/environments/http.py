"""`http`: worlds behind a server of your own, or behind an OpenEnv server.

Minimal TOML::

    [agent.environment]
    type = "http"
    base_url = "http://127.0.0.1:8099"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import attrs

from retrograd_hookspecs import BuildContext, Component, EnvironmentProvider, hookimpl, key


@attrs.frozen(kw_only=True)
class HttpEnvironment:
    """Keys of `[agent.environment]` with `type = "http"`."""

    base_url: str = key(doc="Environment server URL.")
    protocol: Literal["auto", "retrograd", "openenv"] = key(
        "auto", doc="`retrograd` (five routes), `openenv` (sessions over WebSocket), or found out: `auto`."
    )
    request_timeout_secs: float = key(60.0, above=0.0, doc="Timeout per request.", unit="seconds")
    connect_timeout_secs: float = key(10.0, above=0.0, doc="Connection timeout.", unit="seconds")
    pool_size: int = key(
        16, minimum=1, maximum=4096, doc="Concurrent connections; keep at least `group_size`."
    )
    max_result_bytes: int = key(65536, minimum=1, doc="Cap on an observation.", unit="bytes")
    headers: Mapping[str, str] = key(
        factory=dict,
        doc="Headers added to every request; `${VAR}` is an environment variable.",
        secret=True,
        default_text="none",
    )

    @base_url.validator
    def _is_an_address(self, attribute: Any, value: str) -> None:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"must be an http:// or https:// address such as http://127.0.0.1:8099, got {value!r}"
            )
        if parts.query or parts.fragment:
            raise ValueError("must have neither a query nor a fragment")


def _build(config: HttpEnvironment, context: BuildContext) -> EnvironmentProvider:
    from ._http_provider import HttpProvider

    return HttpProvider(config, context.base_dir)


@hookimpl
def retrograd_environments() -> list[Component[HttpEnvironment, EnvironmentProvider]]:
    """`http`."""
    return [
        Component(
            name="http",
            config=HttpEnvironment,
            build=_build,
            summary="Worlds behind an HTTP server: five routes, or OpenEnv.",
        )
    ]
