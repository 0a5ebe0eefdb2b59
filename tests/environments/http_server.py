"""A server with the five routes, in a thread, that misbehaves when told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOLS = [
    {
        "name": "add",
        "description": "Add to the sum.",
        "input_schema": {
            "type": "object",
            "properties": {"number": {"type": "number"}},
            "required": ["number"],
        },
    },
    {"name": "stop", "description": "Stop.", "inputSchema": {"type": "object", "properties": {}}},
]

Fault = Callable[[Mapping[str, Any]], tuple[int, Any] | None]
"""Answers a request instead of the server: status and body (bytes as they are), or None."""


class Worlds(ThreadingHTTPServer):
    """Sums. A scenario says in `metadata.env.target` when the task is done."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: dict[str, Fault] = {}
        """By route: "/reset"."""
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.sums: dict[str, dict[str, Any]] = {}
        self.closed: list[str] = []
        self.places = 1000
        self.most = 0
        """Most requests at a time."""
        self.at_work = 0
        self.retry_after = ""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def count(self, route: str) -> int:
        """Requests to a route so far."""
        return sum(path.startswith(route) for path, _ in self.requests)

    def answer(self, path: str, content: Any) -> tuple[int, Any]:
        if path == "/tools":
            return 200, {"tools": TOOLS}
        if path == "/reset":
            with self.lock:
                if len(self.sums) >= self.places:
                    return 429, {"error": "no place"}
                env_id = f"{time.monotonic_ns():x}"
                self.sums[env_id] = {"sum": 0, **content["scenario"].get("metadata", {}).get("env", {})}
            return 200, {"env_id": env_id, "observation": f"the sum is 0, seed {content['seed']}"}
        if path.startswith("/state/"):
            world = self.sums.get(path.removeprefix("/state/"))
            return (200, {"sum": world["sum"]}) if world else (404, {"error": "unknown"})
        world = self.sums.get(content["env_id"])
        if world is None:
            return 410, {"error": "the session has expired"}
        if path == "/close":
            with self.lock:
                self.sums.pop(content["env_id"])
                self.closed.append(content["env_id"])
            return 204, b""
        if content["call"]["name"] == "stop":
            return 200, {"result": "stopped", "done": True}
        world["sum"] += content["call"]["arguments"]["number"]
        done = world["sum"] == world.get("target")
        return 200, {"result": f"the sum is {world['sum']}", "reward": float(done), "done": done}


class _Handler(BaseHTTPRequestHandler):
    server: Worlds
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _serve(self, content: Any) -> None:
        server = self.server
        with server.lock:
            server.at_work += 1
            server.most = max(server.most, server.at_work)
            server.requests.append((self.path, content))
            server.headers.append(dict(self.headers))
        route = "/" + self.path.split("/")[1]
        fault = server.faults.get(route)
        try:
            status, body = (fault and fault(content or {})) or server.answer(self.path, content)
        finally:
            # Before the answer goes out: whoever has it may ask again before this thread runs on.
            with server.lock:
                server.at_work -= 1
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if status == 0:  # the connection breaks
            self.close_connection = True
            return
        try:
            self.send_response(status)
            if status == 429 and server.retry_after:
                self.send_header("Retry-After", server.retry_after)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def worlds() -> Iterator[Worlds]:
    """A running server."""
    server = Worlds()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def times(count: int, status: int, body: Any) -> Fault:
    """A fault of the first `count` requests."""
    left = [count]

    def fault(content: Mapping[str, Any]) -> tuple[int, Any] | None:
        left[0] -= 1
        return (status, body) if left[0] >= 0 else None

    return fault
