"""A real HTTP server on loopback that plays an OpenAI-compatible endpoint, well or badly.

Left alone it judges honestly: a candidate whose text holds `worth 0.7` is worth 0.7. Tests put behaviours
before that, one a request.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

_CANDIDATE = re.compile(
    r"=== candidate (\d+) \[(\w+)\] ===\n(.*?)\n=== end of candidate \1 \[\2\] ===", re.DOTALL
)
_WORTH = re.compile(r"worth (\d+(?:\.\d+)?)")


@attrs.frozen
class Request:
    """What the server was sent."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    time: float

    @property
    def system(self) -> str:
        return str(self.body["messages"][0]["content"])

    @property
    def user(self) -> str:
        return str(self.body["messages"][1]["content"])

    @property
    def candidates(self) -> dict[str, str]:
        """Text by id, in the order of presentation."""
        return {number: text for number, _, text in _CANDIDATE.findall(self.user)}

    @property
    def kind(self) -> str:
        """What is asked for."""
        if '"winner"' in self.system:
            return "comparison"
        return "scores" if '"scores"' in self.system else "summary"

    @property
    def format(self) -> str:
        return str(self.body.get("response_format", {"type": "text"})["type"])


Behaviour = Callable[["Handler", Request], None]


def worth(text: str) -> float:
    """The last worth that a text speaks of; 0.5 if it speaks of none."""
    found = _WORTH.findall(text)
    return float(found[-1]) if found else 0.5


class JudgeServer:
    """Serves in threads until `close`."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.script: deque[Behaviour] = deque()
        self.always: Behaviour | None = None
        """Replaces honesty."""
        self.delay = 0.0
        self.most_at_once = 0
        self.released = threading.Event()
        self._at_once = 0
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", 0), Handler)
        self._http.owner = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def take(self, handler: Handler, request: Request) -> None:
        with self._lock:
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            behaviour = self.script.popleft() if self.script else self.always or honest
        try:
            time.sleep(self.delay)
            behaviour(handler, request)
        finally:
            with self._lock:
                self._at_once -= 1

    def formats(self) -> list[str]:
        """Response formats in the order of the requests."""
        return [request.format for request in self.requests]


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: JudgeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is no news."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = Request(self.path, dict(self.headers), json.loads(body), time.monotonic())
        self.server.owner.take(self, request)

    def send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests look at `requests`."""


def completion(content: Any, **message: Any) -> bytes:
    """The body of a chat completion."""
    said = {"role": "assistant", "content": content} | message
    choice = {"index": 0, "finish_reason": "stop", "message": said}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def scores_of(request: Request, ids: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Honest scores."""
    chosen = list(request.candidates) if ids is None else ids
    return [{"id": i, "explanation": f"because {i}", "score": worth(request.candidates[i])} for i in chosen]


def verdict(request: Request) -> str:
    """The honest answer to a request."""
    if request.kind == "summary":
        return f"summary: worth {worth(request.user)}"
    if request.kind == "scores":
        return json.dumps({"scores": scores_of(request)})
    first, second = (worth(text) for text in request.candidates.values())
    winner = "tie" if first == second else "1" if first > second else "2"
    return json.dumps({"explanation": "as it is worth", "winner": winner})


def honest(handler: Handler, request: Request) -> None:
    handler.send(200, completion(verdict(request)))


def says(make: Callable[[Request], Any], **message: Any) -> Behaviour:
    """Answer with the content that `make` gives."""
    return lambda handler, request: handler.send(200, completion(make(request), **message))


def status(code: int, message: str = "no", **headers: str) -> Behaviour:
    """Refuse."""
    body = json.dumps({"error": {"message": message}}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, request: handler.send(code, body, named)


def cut(handler: Handler, request: Request) -> None:
    """A whole verdict that claims to have been cut at the token limit."""
    body = completion(verdict(request)).replace(b'"finish_reason": "stop"', b'"finish_reason": "length"')
    handler.send(200, body)


def raw(body: bytes, content_type: str = "application/json", code: int = 200) -> Behaviour:
    """Any body."""
    return lambda handler, request: handler.send(code, body, {"Content-Type": content_type})


def half_a_body(handler: Handler, request: Request) -> None:
    body = completion(verdict(request))
    handler.send(200, body[: len(body) // 2], {"Content-Length": str(len(body))})
    handler.close_connection = True


def reset(handler: Handler, request: Request) -> None:
    """Close with RST."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def hang(handler: Handler, request: Request) -> None:
    """Say nothing until the server is closed."""
    handler.server.owner.released.wait(30)
    handler.close_connection = True


def drip(handler: Handler, request: Request) -> None:
    """Send a byte now and then: every wait is short, the whole is not."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while not handler.server.owner.released.wait(0.05):
        handler.wfile.write(b" ")
    handler.close_connection = True


def only_formats(*known: str) -> Behaviour:
    """A server that refuses every other response_format with 400."""

    def behave(handler: Handler, request: Request) -> None:
        if request.format in known:
            honest(handler, request)
        else:
            status(400, f"response_format.type {request.format} is not supported")(handler, request)

    return behave
