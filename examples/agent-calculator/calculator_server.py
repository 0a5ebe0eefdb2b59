"""An MCP server with two tools, over stdio; `[[agent.mcp_servers]]` starts it."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", version="1.0")


@server.tool(structured_output=False)
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool(structured_output=False)
def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


if __name__ == "__main__":
    server.run()
