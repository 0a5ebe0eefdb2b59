"""An OpenAI-compatible endpoint: its address, its model, and the key that stays in the environment."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import SplitResult, urlsplit

import attrs

from retrograd_hookspecs import ConfigError, Problem


@attrs.frozen(kw_only=True)
class Endpoint:
    """Where and how a model is asked. `api_key` "" sends none; `temperature` None is the server's own."""

    base_url: str
    model: str
    api_key: str = attrs.field(default="", repr=False)
    api_key_env: str = ""
    temperature: float | None = None
    timeout_secs: float = 120.0
    max_retries: int = 2
    max_concurrency: int = 4

    @property
    def is_local(self) -> bool:
        """True if the endpoint is on this machine's loopback."""
        return is_loopback(self.base_url)


def is_loopback(base_url: str) -> bool:
    """True for an address of this machine's loopback."""
    host = _split(base_url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_base_url(value: str) -> None:
    """Raise `ValueError` unless `/chat/completions` can be added to the address."""
    parts = _split(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"must be an http:// or https:// address such as https://api.openai.com/v1, got {value!r}"
        )
    if parts.username or parts.password:
        raise ValueError("holds a credential; give the name of its environment variable in api_key_env")
    if parts.query or parts.fragment:
        raise ValueError(f"must have no query and no fragment, got {value!r}")
    if parts.path.rstrip("/").endswith("/chat/completions"):
        raise ValueError(f"must end before /chat/completions, which is added to it, got {value!r}")


def check_model(value: str) -> None:
    """Raise `ValueError` for an empty name."""
    if not value.strip():
        raise ValueError("must name a model, is empty")


def api_key(base_url: str, variable: str, *, where: str, key: str = "api_key_env") -> str:
    """The key in an environment variable; "" for a server on this machine that was given none.

    Raises: `ConfigError` at `where` that names the variable if it is not set, empty, or cannot be sent as a
    header.
    """
    value = os.environ.get(variable, "").strip()
    if value and not (value.isascii() and value.isprintable()):
        message = f"the key in {variable} holds characters that no HTTP header can"
        raise ConfigError([Problem(where=where, key=key, message=message, hint="set it anew")])
    if value or is_loopback(base_url):
        return value
    state = "is empty" if variable in os.environ else "is not set"
    raise ConfigError(
        [
            Problem(
                where=where,
                key=key,
                message=f"the environment variable {variable} {state}; {base_url} needs a key",
                hint=f"export {variable}=…, or name another variable in api_key_env",
            )
        ]
    )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # is parsed when it is read
    except ValueError as error:
        raise ValueError(f"is not an address: {error}") from None
    return parts
