"""MCP servers without the SDK, over stdio, most of which do what they must not: KIND [ARGUMENT…].

`plain` has the tools that the arguments name; `deaf` writes its process ids to a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TextIO


def say(text: str, stream: TextIO = sys.stdout) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def answer(request: dict, result: dict) -> None:
    say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}))


def refuse(request: dict, code: int, message: str) -> None:
    error = {"code": code, "message": message}
    say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}))


def requests():
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("method") == "server/discover":
            refuse(request, -32601, "unknown")
        elif request.get("method") == "initialize":
            answer(
                request,
                {
                    "protocolVersion": request["params"]["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "bad", "version": "0"},
                },
            )
        elif "id" in request:
            yield request


def tools(request: dict, *names: str) -> None:
    schema = {"type": "object", "properties": {}}
    answer(request, {"tools": [{"name": name, "inputSchema": schema} for name in names]})


def main() -> None:
    kind = sys.argv[1]
    if kind == "dies":
        say("cannot open the data base", sys.stderr)
        sys.exit(3)
    if kind == "silent":
        say("waiting for godot", sys.stderr)
        time.sleep(600)
    if kind == "noise":
        say("Server listening on stdio")
        say("a warning", sys.stderr)
        time.sleep(600)
    if kind == "deaf":  # ignores the end of its input and SIGTERM; so does its child
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(sys.argv[2], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
    if kind == "chatty":
        say("Loading…")
    for request in requests():
        method = request["method"]
        if method == "tools/list" and kind == "no-list":
            time.sleep(600)
        elif method == "tools/list" and kind == "endless":
            answer(request, {"tools": [], "nextCursor": "again"})
        elif method == "tools/list" and kind == "unspeakable":
            tools(request, "has a space")
        elif method == "tools/list":
            tools(request, *(sys.argv[2:] if kind == "plain" else ("echo", "add")))
        elif kind == "deaf":
            time.sleep(600)
        elif kind == "garbage":
            answer(request, {"content": "no list"})
        elif kind == "huge":
            answer(request, {"content": [{"type": "text", "text": "é" * 16_666_667}]})  # 100 MB as JSON
        elif kind == "refuses":
            refuse(request, -32602, "never heard of it")
        else:
            answer(request, {"content": [{"type": "text", "text": f"{sys.argv[2:]}"}]})


main()
