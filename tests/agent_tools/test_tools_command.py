"""`retrograd tools list` in a process of its own, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environments.http_server import worlds

HERE = Path(__file__).parent
RUN = """
[run]
algorithm = "agent_grpo"
[model]
path = "{model}"
[output]
path = "out.gguf"
[lora]
[training]
ctx = 256
micro_batch = 64
lr = 1e-5
[agent]
scenarios = "scenarios.jsonl"
"""
SERVER = f"""
[[agent.mcp_servers]]
name = "plain"
command = ["{sys.executable}", "{HERE / "misbehaving_server.py"}", "plain", "search", "add"]
stateless = true
"""


@pytest.fixture
def listing(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command with further tables of the file."""
    (tmp_path / "scenarios.jsonl").write_text('{"id": "a", "user": "x"}\n')

    def run(tables: str, *flags: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "agent.toml"
        path.write_text(RUN.format(model=tiny_model()) + tables)
        command = [sys.executable, "-m", "retrograd", "tools", "list", str(path), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


def test_servers_are_listed_with_their_tools(listing: Callable[..., Any]) -> None:
    with worlds() as server:
        environment = f'[agent.environment]\ntype = "http"\nbase_url = "{server.url}"\n'
        refused = listing(SERVER + environment)
        assert refused.returncode == 2
        assert (
            "MCP server 'plain': its tool 'add' is one of the environment's toolset 'http', too"
            in refused.stderr
        )

        denied = SERVER + 'denied_tools = ["add"]\n' + environment
        shown = listing(denied)
        assert shown.returncode == 0, shown.stderr
        *lines, catalogue_hash, mcp_hash = shown.stdout.splitlines()
        assert lines == [
            "toolset http: 2 tools",
            "  add   Add to the sum.",
            "  stop  Stop.",
            "MCP server plain: 1 tool",
            "  search",
        ]
        found = json.loads(listing(denied, "--json").stdout)
        assert catalogue_hash == f"catalogue hash: {found['catalogue_hash']}"
        assert mcp_hash == f"mcp hash: {found['mcp_hash']}"
        assert found["toolsets"]["http"][0]["input_schema"]["required"] == ["number"]
        asked = server.count("/")
        offline = listing(denied, "--no-connect")
        assert offline.stdout.splitlines() == ["not asked: environment http", "not asked: MCP server plain"]
        assert server.count("/") == asked


def test_toolsets_are_listed_with_identities(listing: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "tools.toml").write_text(
        '[[tool]]\nid = "grep"\nversion = "2"\nname = "search"\nbuiltin = { factory = "grep" }\n'
        '[toolset.mine]\ntools = ["grep", "submit"]\n'
    )
    local = (
        '[agent.environment]\ntype = "local"\nallow_unsandboxed = true\n[agent.environment.tools]\n'
        'default = "mine"\nscenario_toolsets = ["python"]\nfiles = ["tools.toml"]\n'
    )
    shown = listing(local)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0] == "toolset mine (default): 2 tools"
    assert [line.split()[:2] for line in lines[1:3]] == [["search", "grep@2"], ["submit", "submit@1"]]
    assert lines[3] == "toolset python: 9 tools"
    [tests] = [line for line in lines if line.split()[:1] == ["run_tests"]]
    assert tests.split()[1] == "pytest@1"
    found = json.loads(listing(local, "--json").stdout)
    assert found["toolsets"]["mine"][0]["origin"] == f"{tmp_path}/tools.toml:1"
    assert lines[-1] == f"catalogue hash: {found['catalogue_hash']}"

    (tmp_path / "tools.toml").write_text('[toolset.mine]\ntools = ["gerp"]\n')
    refused = listing(local)
    assert refused.returncode == 2
    assert f"{tmp_path}/tools.toml:2: toolset.mine.tools[0]: there is no tool 'gerp'" in refused.stderr


def test_a_server_that_is_not_there_ends_the_command(listing: Callable[..., Any]) -> None:
    local = '[agent.environment]\ntype = "local"\nallow_unsandboxed = true\n[agent.environment.tools]\n'
    gone = '[[agent.mcp_servers]]\nname = "gone"\ncommand = ["no-such-program"]\nstateless = true\n'
    seen = listing(gone + local + 'default = "base"\n')
    assert seen.returncode != 0
    assert "the MCP server 'gone'" in seen.stderr
