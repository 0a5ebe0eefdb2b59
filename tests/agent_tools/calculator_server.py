"""An MCP server: `python calculator_server.py` over stdio, with a port as argument over streamable HTTP."""

from __future__ import annotations

import os
import sys

import anyio
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("calculator", version="1.2")


@server.tool()
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


@server.tool()
def divide(a: float, b: float) -> str:
    """Divide a number by another."""
    if b == 0:
        raise ValueError("division by zero")
    return f"{a / b:g}"


@server.tool()
def picture() -> list[str | Image]:
    """A text and a picture."""
    return ["here it is", Image(data=b"\0" * 100, format="png")]


@server.tool()
def repeat(text: str, times: int) -> str:
    """Repeat a text."""
    return text * times


@server.tool()
async def wait(secs: float) -> str:
    """Wait."""
    await anyio.sleep(secs)
    return "waited"


@server.tool()
def crash() -> str:
    """End the process."""
    os.write(2, b"out of memory\n")
    os._exit(9)


@server.tool()
def variable(name: str) -> str:
    """An environment variable, or nothing."""
    return os.environ.get(name, "(not set)")


@server.tool()
def directory() -> str:
    """The working directory."""
    return os.getcwd()


@server.tool()
def process() -> str:
    """Id of the process."""
    return str(os.getpid())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
