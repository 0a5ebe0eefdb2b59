"""A client of OpenAI-compatible chat endpoints: an answer of a given form, or why there is none.

Source: OpenAI API reference, Create chat completion; RFC 9110 section 10.2.3, Retry-After.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

from .chat_endpoint import Endpoint
from .chat_replies import ChatError, ReplyError, fingerprint, shown

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

T = TypeVar("T")
ChatMessage = Mapping[str, Any]

TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses below 500 that a later attempt may not meet again."""
MAX_RETRY_AFTER_SECS = 60.0
MAX_BACKOFF_SECS = 20.0
MAX_REPLY_BYTES = 8 << 20

_FORMATS = ("json_schema", "json_object", "text")
"""Ways to ask for structured output, the surest first."""


class RequestError(ChatError):
    """A request that brought no reply. `transient`: it may if it is sent again."""

    def __init__(self, message: str, *, status: int = 0, transient: bool, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.transient, self.retry_after = status, transient, retry_after


@attrs.frozen(kw_only=True)
class Form:
    """The form of an answer: its JSON Schema, or None for plain text, and a name for the schema."""

    name: str
    schema: Mapping[str, Any] | None = None


class ReplyCache(Protocol):
    """Replies by a hash of the request."""

    def get(self, key: str) -> Any | None:
        """The reply stored under a key, or None."""

    def put(self, key: str, reply: Any) -> None:
        """Store a reply."""


class ChatClient:
    """Asks one model. `counts` holds what was spent, until it is taken.

    Connections and the limit of parallel requests belong to an event loop: the client may be used in one loop
    after another, not in two at once.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        cache: ReplyCache | None = None,
        first_wait_secs: float = 0.5,
    ) -> None:
        from anyio.lowlevel import RunVar

        self._endpoint = endpoint
        self._cache = cache
        self._first_wait_secs = first_wait_secs
        self._url = f"{endpoint.base_url.rstrip('/')}/chat/completions"
        self._format = 0  # index of the format that the server is known to take
        self._pools: RunVar[_Pool] = RunVar("pool")
        self._closed = False
        self.counts: dict[str, float] = defaultdict(float)

    async def ask(
        self, messages: Sequence[ChatMessage], form: Form, read: Callable[[str], T], **fields: Any
    ) -> T:
        """`read(text)` of the model's answer, or of the cached answer to an equal request. `fields` go into
        the request.

        A transient error and an answer that `read` refuses with `ReplyError` are tried again, the latter with
        what was wrong with it; `max_retries` bounds both together.

        Raises: `ChatError` with the reason if no attempt succeeded.
        """
        key = self._key(messages, form, fields)
        cached = self._cache.get(key) if self._cache is not None else None
        if isinstance(cached, str):
            try:
                answer = read(cached)
            except ReplyError:
                pass  # it was damaged, or read by other rules: ask again
            else:
                self.counts["cache_hits"] += 1
                return answer
        correction: list[ChatMessage] = []
        async for attempt in self._attempts():
            with attempt:
                text = await self._reply([*messages, *correction], form, fields)
                try:
                    answer = read(text)
                except ReplyError as error:
                    correction = _correction(text, error)
                    raise
        if self._cache is not None:
            self._cache.put(key, text)
        return answer

    async def complete(self, messages: Sequence[ChatMessage], **fields: Any) -> Mapping[str, Any]:
        """The first choice of a completion: `message`, `finish_reason`. `fields` go into the request; those
        that are None do not.

        A transient error is tried again. Raises: `RequestError`.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        body = self._body(messages, Form(name="text"), "text", given)
        async for attempt in self._attempts():
            with attempt:
                return await self._post(body)
        raise AssertionError("the last attempt raises")

    async def close(self) -> None:
        """Close the connections of the running event loop; may be called more than once."""
        self._closed = True
        pool = self._pools.get(None)
        if pool is not None:
            await pool.http.aclose()

    def _key(self, messages: Sequence[ChatMessage], form: Form, fields: Mapping[str, Any]) -> str:
        endpoint = self._endpoint
        temperature = "" if endpoint.temperature is None else repr(float(endpoint.temperature))
        schema = json.dumps(form.schema, sort_keys=True)
        parts = [endpoint.base_url, endpoint.model, temperature, schema, json.dumps(list(messages))]
        return fingerprint(*parts, *([json.dumps(fields, sort_keys=True)] if fields else []))

    def _attempts(self) -> Any:
        import tenacity

        return tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._endpoint.max_retries + 1),
            retry=tenacity.retry_if_exception(_may_pass),
            wait=self._wait,
            before_sleep=self._count_retry,
            reraise=True,
        )

    def _wait(self, state: RetryCallState) -> float:
        import tenacity

        error = state.outcome.exception() if state.outcome is not None else None
        if not isinstance(error, RequestError):
            return 0.0  # the server is well; its model is asked anew
        first = self._first_wait_secs
        backoff = tenacity.wait_exponential(multiplier=first, max=MAX_BACKOFF_SECS)
        jitter = tenacity.wait_random(0.0, first)
        return max(backoff(state) + jitter(state), min(error.retry_after, MAX_RETRY_AFTER_SECS))

    def _count_retry(self, state: RetryCallState) -> None:
        self.counts["retries"] += 1

    async def _reply(self, messages: Sequence[ChatMessage], form: Form, fields: Mapping[str, Any]) -> str:
        """Text of one reply, in the surest format that the server takes."""
        if form.schema is None:
            return _content(await self._post(self._body(messages, form, "text", fields)))
        refusal: RequestError | None = None
        for level in range(self._format, len(_FORMATS)):
            try:
                body = self._body(messages, form, _FORMATS[level], fields)
                text = _content(await self._post(body))
            except RequestError as error:
                if error.status not in (400, 422):
                    raise
                # Servers word the refusal of a format in many ways. A bad request of another kind is refused
                # in every format, and then the first refusal tells most.
                refusal = refusal or error
            else:
                self._format = level
                return text
        assert refusal is not None
        raise refusal

    def _body(
        self, messages: Sequence[ChatMessage], form: Form, level: str, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._endpoint.model, "messages": list(messages), **fields}
        if self._endpoint.temperature is not None:
            body["temperature"] = self._endpoint.temperature
        if level == "json_schema":
            schema = {"name": form.name, "strict": True, "schema": form.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif level == "json_object":
            body["response_format"] = {"type": "json_object"}
        return body

    async def _post(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        import anyio
        import httpx

        pool = self._pool()
        async with pool.limiter:
            self.counts["requests"] += 1
            began = time.monotonic()
            try:
                with anyio.fail_after(self._endpoint.timeout_secs):
                    response, data = await self._exchange(pool.http, json.dumps(body).encode())
            except TimeoutError:
                seconds = self._endpoint.timeout_secs
                raise RequestError(f"{self._url}: no reply in {seconds:g} seconds", transient=True) from None
            except httpx.RequestError as error:
                why = str(error) or type(error).__name__
                raise RequestError(f"{self._url}: {self._hide(why)}", transient=True) from error
            finally:
                self.counts["seconds"] += time.monotonic() - began
        return self._choice(response, data)

    async def _exchange(self, http: httpx.AsyncClient, content: bytes) -> tuple[httpx.Response, bytes]:
        async with http.stream("POST", self._url, content=content) as response:
            data = bytearray()
            async for part in response.aiter_bytes():
                data += part
                if len(data) > MAX_REPLY_BYTES:
                    raise RequestError(
                        f"{self._url}: the reply is longer than {MAX_REPLY_BYTES} bytes", transient=False
                    )
        return response, bytes(data)

    def _pool(self) -> _Pool:
        if self._closed:
            raise ChatError("the client is closed")
        pool = self._pools.get(None)
        if pool is None:
            pool = _Pool.open(self._endpoint)
            self._pools.set(pool)
        return pool

    def _choice(self, response: httpx.Response, data: bytes) -> Mapping[str, Any]:
        """The first choice of a response. Raises `RequestError`."""
        status = response.status_code
        if not response.is_success:
            raise RequestError(
                self._explain(status, _message(data), response.headers.get("location", "")),
                status=status,
                transient=status in TRANSIENT or status >= 500,
                retry_after=retry_after(response.headers.get("retry-after", "")),
            )
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            kind = response.headers.get("content-type", "no content type")
            raise RequestError(
                f"{self._url}: the reply is not JSON ({kind}): {self._hide(shown(_decoded(data)))}",
                transient=True,
            ) from None
        if not isinstance(value, dict):
            raise RequestError(f"{self._url}: the reply is no object: {shown(value)}", transient=True)
        self._count_tokens(value.get("usage"))
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            # Gateways report an error of the model behind them with status 200.
            error = value.get("error")
            code = error.get("code") if isinstance(error, dict) else None
            permanent = isinstance(code, int) and 400 <= code < 500 and code not in TRANSIENT
            why = self._hide(_message(data))
            raise RequestError(f"{self._url}: the reply has no choices: {why}", transient=not permanent)
        choice: Mapping[str, Any] = choices[0]
        return choice

    def _explain(self, status: int, message: str, location: str) -> str:
        endpoint = self._endpoint
        if status in (401, 403):
            key = f"the key in {endpoint.api_key_env}" if endpoint.api_key else "a request without a key"
            what = f"the server refuses {key}"
        elif status == 404:
            what = f"there is no model {endpoint.model!r}, or no endpoint at this base_url"
        elif 300 <= status < 400:
            what = f"it redirects to {location or 'another address'}; set base_url to that"
        else:
            what = "the server refuses the request" if status < 500 else "the server failed"
        return f"{self._url}: {what} (status {status}): {self._hide(message)}"

    def _hide(self, text: str) -> str:
        return text.replace(self._endpoint.api_key, "***") if self._endpoint.api_key else text

    def _count_tokens(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        for name in ("prompt_tokens", "completion_tokens"):
            tokens = usage.get(name)
            if isinstance(tokens, int) and tokens >= 0:
                self.counts[name] += tokens


@attrs.define(kw_only=True, eq=False)
class _Pool:
    """Connections and the limit of one event loop."""

    http: Any
    limiter: Any

    @classmethod
    def open(cls, endpoint: Endpoint) -> _Pool:
        import anyio
        import httpx

        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if endpoint.api_key:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        http = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # `_post` has one deadline for the whole exchange
            limits=httpx.Limits(max_connections=endpoint.max_concurrency),
            # A proxy of the environment does not lead to this machine's loopback.
            trust_env=not endpoint.is_local,
        )
        return cls(http=http, limiter=anyio.Semaphore(endpoint.max_concurrency))


def retry_after(header: str) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date; 0 if it says nothing sensible."""
    try:
        seconds = float(header)
    except ValueError:
        pass
    else:
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, ReplyError) or (isinstance(error, RequestError) and error.transient)


def _correction(text: str, error: ReplyError) -> list[ChatMessage]:
    said = text if len(text) <= 4000 else f"{text[:4000]}…"
    why = f"That reply cannot be used: {error}. Reply again, in the form asked for."
    return [
        {"role": "assistant", "content": said or "(empty)"},
        {"role": "user", "content": why},
    ]


def _content(choice: Mapping[str, Any]) -> str:
    """Text of a choice: a string, or the text parts of an array. Raises `ReplyError` if there is none."""
    if choice.get("finish_reason") == "length":
        raise ReplyError("the model's reply was cut at its token limit")
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if isinstance(content, str) and content.strip():
        return content
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal:
        raise ReplyError(f"the model refuses to answer: {shown(refusal)}")
    raise ReplyError(f"the model wrote nothing (finish reason {choice.get('finish_reason')})")


def _message(data: bytes) -> str:
    """What a body says went wrong."""
    text = _decoded(data)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return shown(text)
    for name in ("error", "message", "detail"):
        inner = value.get(name) if isinstance(value, dict) else None
        if inner:
            inner = inner.get("message", inner) if isinstance(inner, dict) else inner
            return shown(inner)
    return shown(value)


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")
