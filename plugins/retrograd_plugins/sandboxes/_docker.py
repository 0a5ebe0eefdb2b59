"""The connection to a container engine that speaks Docker's API: Docker, or Podman in Docker mode."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from retrograd_hookspecs import RolloutError

T = TypeVar("T")

DEFAULT_HOST = "unix:///var/run/docker.sock"
TIMEOUT_SECS = 60
"""How long the engine may take to answer a request."""
HOW_TO_START = (
    "start Docker Desktop, Colima (`colima start`), dockerd, or Podman (`podman system service --time=0 &`),"
    " or set DOCKER_HOST to the engine's address, such as unix:///run/podman/podman.sock"
)


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call what blocks, in a thread of its own. It is never left behind: whoever is cancelled waits for it,
    and gets its result."""
    import anyio
    import anyio.to_thread

    return await anyio.to_thread.run_sync(function, *arguments, limiter=anyio.CapacityLimiter(1))


class Engine:
    """A container engine. `api` is docker-py's client; its calls block."""

    def __init__(self, api: Any, host: str, *, is_podman: bool) -> None:
        self.api = api
        self.host = host
        self.is_podman = is_podman

    @classmethod
    def connect(cls, connections: int) -> Engine:
        """Connect to `DOCKER_HOST`, else to Docker's current context, else to its usual socket.

        Raises: `RolloutError` if no engine answers, with the address that was tried and how to start one.
        """
        import docker

        host, origin = _address()
        if not host.startswith(("unix://", "tcp://", "http://")) or os.environ.get("DOCKER_TLS_VERIFY"):
            raise RolloutError(
                f"the container engine at {host} ({origin}) cannot be used: commands need a plain socket;"
                " forward it to this machine, and set DOCKER_HOST to unix://… or tcp://…"
            )
        try:
            api = docker.APIClient(
                base_url=host, version="auto", timeout=TIMEOUT_SECS, max_pool_size=connections
            )
            components = api.version().get("Components") or []
        except Exception as error:  # docker-py lets errors of requests, urllib3 and ssl through
            cause = _reason(error)
            raise RolloutError(
                f"no container engine answers at {host} ({origin}): {cause}; {HOW_TO_START}"
            ) from error
        return cls(api, host, is_podman=any("podman" in str(c.get("Name")).lower() for c in components))

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Errors of the engine as `RolloutError`: `what` is what was being done."""
        import docker.errors
        import requests.exceptions

        try:
            yield
        except docker.errors.APIError as error:
            raise EngineRefusedError(f"{what}: {_reason(error)}", error.status_code or 0) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise RolloutError(
                f"{what}: the container engine at {self.host} does not answer: {_reason(error)}"
            ) from error

    def close(self) -> None:
        """Close all connections."""
        with suppress(Exception):
            self.api.close()


class EngineRefusedError(RolloutError):
    """The engine answered with an error. `status` is HTTP's, which differs between engines."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _address() -> tuple[str, str]:
    """Address of the engine, and where it comes from."""
    host = os.environ.get("DOCKER_HOST", "").strip()
    if host:
        return host, "DOCKER_HOST"
    with suppress(Exception):  # contexts are a convenience: a broken file of theirs is no reason to stop
        from docker.context import ContextAPI

        context = ContextAPI.get_current_context()
        if context is not None and context.name != "default" and context.Host:
            return str(context.Host), f"Docker's context {context.name!r}; DOCKER_HOST is not set"
    return DEFAULT_HOST, "DOCKER_HOST is not set"


def _reason(error: BaseException) -> str:
    """The cause at the bottom of what HTTP libraries wrap around it, on one line."""
    explanation = getattr(error, "explanation", None)
    if explanation:
        text = explanation.decode("utf-8", "replace") if isinstance(explanation, bytes) else str(explanation)
        return " ".join(text.split())
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
