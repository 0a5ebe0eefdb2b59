"""`mcp.json` files of several editors, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retrograd.agent.mcp import McpServer, load_mcp_config, mcp_tools
from retrograd_hookspecs import ConfigError


def written(path: Path, content: Any) -> Path:
    """A file of JSON, or of the text."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_both_roots_and_all_variables(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# keys\nexport KEY='from file'\nOTHER=\"a b\" # why\n")
    path = written(
        tmp_path / ".vscode" / "mcp.json",
        {
            "inputs": [{"id": "token", "type": "promptString"}],
            "mcpServers": {
                "local": {
                    "command": "${BIN}/server",
                    "args": ["--root", "${workspaceFolder}/src", "${env:DEEP}", "${NONE:-default}"],
                    "env": {"KEY": "own", "PORT": 80},
                    "envFile": "../.env",
                    "cwd": "..",
                    "autoApprove": ["read"],
                },
                "off": {"command": "x", "disabled": True},
            },
            "servers": {
                "remote": {
                    "type": "http",
                    "url": "https://x.org/mcp",
                    "headers": {"Authorization": "Bearer ${TOKEN}"},
                    "stateless": True,
                    "denied_tools": ["drop_*"],
                }
            },
        },
    )
    environ = {"BIN": "/opt", "DEEP": "${TOKEN}", "TOKEN": "t0k"}
    servers, disabled = load_mcp_config(path, environ)
    assert servers == (
        McpServer(
            name="local",
            command=("/opt/server", "--root", f"{tmp_path}/src", "${TOKEN}", "default"),
            env={"KEY": "own", "OTHER": "a b", "PORT": "80"},
            cwd=path.parent / "..",
        ),
        McpServer(
            name="remote",
            url="https://x.org/mcp",
            headers={"Authorization": "Bearer t0k"},
            stateless=True,
            denied_tools=("drop_*",),
        ),
    )
    assert disabled == ("off",)


def test_every_mistake_is_reported(tmp_path: Path) -> None:
    path = written(
        tmp_path / "mcp.json",
        {
            "mcpServers": {
                "a": {"command": "x", "args": ["${MISSING}"]},
                "b": {"url": "https://x.org", "headers": {"Key": "${input:token}"}},
                "c": {"type": "sse", "url": "https://x.org/sse"},
                "d": {"type": "pipe", "command": "x"},
                "e": {"args": []},
                "f": {"command": ["x"]},
                "g": 3,
                "h": {"command": "x", "envFile": "none.env"},
                "i": {"command": "x", "env": {"A": "${a b}"}},
                "j": {"command": "x", "tool_timeout_secs": 0},
            }
        },
    )
    with pytest.raises(ConfigError) as refused:
        load_mcp_config(path, {})
    found = {p.key.split(".")[1]: str(p) for p in refused.value.problems}
    expected = {
        "a": "the environment variable MISSING is not set",
        "b": "${input:token} asks a person, whom a run has not: write ${env:VARIABLE}",
        "c": "the old SSE transport is not supported",
        "d": 'unknown transport the string "pipe"',
        "e": "give command (a local server) or url (a remote one)",
        "f": "expected a string, got an array of 1",
        "g": "expected a table, got 3",
        "h": "there is no file",
        "i": "${a b} is not known",
        "j": "must be above 0",
    }
    assert set(found) == set(expected)
    for name, words in expected.items():
        assert words in found[name]
        assert found[name].startswith(f"{path}: mcpServers.{name}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{\n"a": }', "mcp.json:2: not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "there is neither mcpServers nor servers"),
        ('{"servers": []}', "servers: expected a table of servers"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as refused:
        load_mcp_config(written(tmp_path / "mcp.json", content))
    assert words in str(refused.value)
    with pytest.raises(ConfigError, match="cannot read the file: No such file"):
        load_mcp_config(tmp_path / "none.json")


def test_servers_of_all_sources_have_names_of_their_own(tmp_path: Path) -> None:
    written(tmp_path / "a.json", {"mcpServers": {"one": {"command": "x"}}})
    written(tmp_path / "b.json", {"servers": {"one": {"command": "y"}, "two": {"command": "z"}}})
    own = McpServer(name="two", command=("x",))
    with pytest.raises(ConfigError) as refused:
        mcp_tools([own], ["a.json", "b.json"], tmp_path)
    assert [p.message for p in refused.value.problems] == [
        "the server 'one' is defined already, in a.json",
        "the server 'two' is defined already, in agent.mcp_servers",
    ]
    both = mcp_tools([own], Path("a.json"), tmp_path)
    assert both is not None
    assert [server.name for server in both.servers] == ["two", "one"]
    assert mcp_tools([], None) is None


def test_a_variable_of_the_configuration_must_be_set() -> None:
    server = McpServer(name="far", url="https://x.org", headers={"Authorization": "Bearer ${NO_SUCH_TOKEN}"})
    with pytest.raises(ConfigError, match=r"headers.Authorization: the environment variable NO_SUCH_TOKEN"):
        mcp_tools([server])


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"command": ("x",), "url": "http://x"},
        {"url": "ftp://x"},
        {"command": ("",)},
        {"command": ("x",), "headers": {"a": "b"}},
        {"url": "http://x", "env": {"a": "b"}},
        {"command": ("x",), "name": " "},
    ],
)
def test_a_server_has_one_address(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        McpServer(**{"name": "a", **wrong})
