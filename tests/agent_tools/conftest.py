"""Fixtures of tests of tools: a sandbox, and MCP servers from npm.

Environment: RETROGRAD_NODE_MCP, a directory with `@modelcontextprotocol/server-everything` and
`server-filesystem` installed (without it npm installs them once, 40 MB).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from retrograd.cache import cache_dir

from .support import SubprocessSandbox

_PACKAGES = (
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
)


@pytest.fixture
def sandbox(tmp_path: Path) -> SubprocessSandbox:
    """An empty sandbox."""
    work = tmp_path / "work"
    work.mkdir()
    return SubprocessSandbox(work, str(tmp_path / "scratch"))


@pytest.fixture(scope="session")
def node_servers() -> Path:
    """`node_modules/.bin` with the servers `mcp-server-everything` and `mcp-server-filesystem`."""
    given = os.environ.get("RETROGRAD_NODE_MCP")
    directory = Path(given) if given else cache_dir() / "test-node-mcp"
    programs = directory / "node_modules" / ".bin"
    if not (programs / "mcp-server-everything").exists():
        if given:
            pytest.fail(f"RETROGRAD_NODE_MCP={given} has no MCP servers; unset it to have npm install them")
        npm = shutil.which("npm")
        if npm is None:
            pytest.fail("npm is not installed: the tests of MCP run real servers from npm")
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--prefix", directory, *_PACKAGES], check=True
        )
    return programs
