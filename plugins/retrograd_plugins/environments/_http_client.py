"""Requests to an environment server: deadlines, retries where they are safe, and words for what fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from retrograd_hookspecs import RolloutError

if TYPE_CHECKING:
    import httpx

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Longest body of a response."""
ATTEMPTS = 4
"""How often a request that may be repeated is sent."""
_FIRST_WAIT_SECS = 0.25
_LONGEST_WAIT_SECS = 10.0
_KEEPALIVE_SECS = 2.0
"""Shorter than servers keep an idle connection, or a step could meet one that was just closed."""
_TRANSIENT = frozenset({429, 502, 503, 504})
_SHOWN_CHARACTERS = 300


@attrs.frozen(kw_only=True)
class Reply:
    """Status and body of a response."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """True for 2xx."""
        return 200 <= self.status < 300

    def json(self, what: str) -> Any:
        """The body as JSON. Raises `RolloutError` that names the request."""
        try:
            return json.loads(self.body, parse_constant=_no_constant)
        except ValueError as error:
            raise RolloutError(f"{what}: the answer is no JSON: {error}; it is {self.shown()}") from error

    def shown(self) -> str:
        """The beginning of the body, for messages."""
        text = self.body.decode("utf-8", errors="replace")
        return repr(text[:_SHOWN_CHARACTERS]) + ("…" if len(text) > _SHOWN_CHARACTERS else "")

    def words(self) -> str:
        """What an error response says: FastAPI's and similar keys, or the body."""
        try:
            content = json.loads(self.body)
        except ValueError:
            return self.body.decode("utf-8", errors="replace").strip()
        if isinstance(content, Mapping):
            for name in ("error", "detail", "message"):
                if name in content:
                    content = content[name]
                    break
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


class HttpClient:
    """A pool of connections to one server. Made and used in one event loop.

    Args:
        base_url: without a slash at its end.
        pool_size: most connections at a time.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str],
        connect_secs: float,
        request_secs: float,
        pool_size: int,
    ) -> None:
        import httpx

        self._base_url = base_url
        self._request_secs = request_secs
        self._connect_secs = connect_secs
        self._client = httpx.AsyncClient(
            headers=dict(headers),
            # Waiting for a connection of the pool is no fault of the server.
            timeout=httpx.Timeout(request_secs, connect=connect_secs, pool=None),
            limits=httpx.Limits(
                max_connections=pool_size,
                max_keepalive_connections=pool_size,
                keepalive_expiry=_KEEPALIVE_SECS,
            ),
        )

    async def get(self, path: str) -> Reply:
        """GET, repeated where the server cannot answer. Raises `RolloutError`."""
        return await self._repeated("GET", path, None)

    async def post(self, path: str, content: Any, *, repeat: bool = False) -> Reply:
        """POST of JSON; sent again only with `repeat`, or if no connection came about. Raises
        `RolloutError`."""
        if repeat:
            return await self._repeated("POST", path, content)
        return await self._once("POST", path, content)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _repeated(self, method: str, path: str, content: Any) -> Reply:
        wait = _FIRST_WAIT_SECS
        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS
            try:
                reply, asked = await self._send(method, path, content)
            except _UnansweredError as error:
                if last:
                    raise RolloutError(
                        f"{method} {self._base_url}{path}: {error} ({attempt} times)"
                    ) from error
                asked = None
            else:
                if reply.status not in _TRANSIENT or last:
                    return reply
            await anyio.sleep(min(asked if asked is not None else wait, _LONGEST_WAIT_SECS))
            wait *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, method: str, path: str, content: Any) -> Reply:
        try:
            reply, _ = await self._send(method, path, content)
        except _UnansweredError as error:
            raise RolloutError(f"{method} {self._base_url}{path}: {error}") from error
        return reply

    async def _send(self, method: str, path: str, content: Any) -> tuple[Reply, float | None]:
        """The reply, and the seconds after which the server asks to be asked again."""
        import httpx

        # Escaped, for a text of a model may hold what UTF-8 has no bytes for.
        data = json.dumps(content).encode() if content is not None else None
        kind = {"content-type": "application/json"} if data is not None else {}
        try:
            with anyio.fail_after(self._request_secs + self._connect_secs):
                async with self._client.stream(
                    method, self._base_url + path, content=data, headers=kind
                ) as response:
                    body = await _body(response)
        except httpx.ConnectError as error:
            raise _UnansweredError(f"no connection: {error}") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise _UnansweredError(f"no answer within {self._request_secs:g} seconds") from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _UnansweredError(f"the connection failed: {str(error) or type(error).__name__}") from error
        return Reply(status=response.status_code, body=body), _retry_after(response)


class _UnansweredError(Exception):
    """There was no response."""


async def _body(response: httpx.Response) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise RolloutError(f"{response.request.url}: the answer is longer than {MAX_BODY_BYTES} bytes")
        parts.append(chunk)
    return b"".join(parts)


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return max(float(response.headers.get("retry-after", "")), 0.0)
    except ValueError:
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
