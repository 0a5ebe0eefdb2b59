"""MCP servers: their configuration, `mcp.json` files, and the tools that all trajectories share."""

from .config import McpServer
from .files import load_mcp_config
from .tools import McpTools, mcp_tools

__all__ = ["McpServer", "McpTools", "load_mcp_config", "mcp_tools"]
