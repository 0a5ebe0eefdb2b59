"""MCP servers that misbehave: the run says which, shows what it said, and leaves nothing behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import psutil
import pytest

from retrograd.agent.mcp import McpServer, McpTools, connection
from retrograd_hookspecs import AuditFinding, ConfigError, RetrogradError, RolloutError

from .test_mcp import CALCULATOR, called, names, plain, use

MISBEHAVING = str(Path(__file__).parent / "misbehaving_server.py")


def bad(kind: str, **more: object) -> McpServer:
    """A server that misbehaves."""
    options: dict[str, object] = {"name": kind, "command": (sys.executable, MISBEHAVING, kind), **more}
    return McpServer(**options)  # type: ignore[arg-type]


def refused(*servers: McpServer) -> str:
    """What opening them fails with. No process is left."""
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RetrogradError) as error:
        names(servers)
    assert set(psutil.Process().children(recursive=True)) <= before
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dies", ["the MCP server 'dies': connecting failed", "cannot open the data base"]),
        ("silent", ["'silent': connecting took longer than 2 seconds", "waiting for godot"]),
        (
            "noise",
            ["'noise': connecting took longer", "began with 'Server listening on stdio'", "a warning"],
        ),
        ("no-list", ["'no-list': listing its tools took longer than 2 seconds"]),
        ("endless", ["has more than 1000 pages"]),
    ],
)
def test_a_server_that_cannot_connect_shows_what_it_said(
    monkeypatch: pytest.MonkeyPatch, kind: str, words: list[str]
) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECS", 30.0 if kind in ("dies", "endless") else 2.0)
    message = refused(bad(kind))
    for word in words:
        assert word in message


def test_a_program_or_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no program 'no-such-program'" in refused(
        McpServer(name="a", command=("no-such-program",))
    )
    assert "there is no directory" in refused(McpServer(name="a", command=CALCULATOR, cwd=tmp_path / "none"))
    program = tmp_path / "program"
    program.write_text("not a program")
    program.chmod(0o755)
    assert "cannot be started: Exec format error" in refused(McpServer(name="a", command=(str(program),)))


def test_a_remote_server_that_is_not_there() -> None:
    message = refused(McpServer(name="far", url="http://127.0.0.1:9/mcp"))
    assert "the MCP server 'far': connecting failed: " in message


def test_every_required_server_that_fails_is_named() -> None:
    message = refused(bad("dies"), McpServer(name="b", command=("no-such-program",)), bad("dies", name="c"))
    assert [line for line in message.split("\n") if line.startswith("the MCP server")] == [
        "the MCP server 'dies': connecting failed: Connection closed; its stderr ended with:",
        "the MCP server 'b': connecting failed: there is no program 'no-such-program'",
        "the MCP server 'c': connecting failed: Connection closed; its stderr ended with:",
    ]


def test_a_server_that_is_not_required_is_left_out() -> None:
    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> None:
        assert [spec.name for spec in tools.specs()] == ["add"]
        [left_out, calc] = findings
        assert (left_out.level, calc.level) == ("warning", "ok")
        assert left_out.message.startswith("left out: the MCP server 'dies'")

    use([bad("dies", required=False), plain("calc", "add")], body)
    message = refused(bad("dies", required=False), bad("dies", name="other", required=False))
    assert message.startswith("no MCP server can be reached")
    assert "'other'" in message


def test_a_chatty_server_is_understood() -> None:
    [seen] = called([bad("chatty")], ("echo", {}))
    assert seen.observation == "[]"


def test_a_server_that_refuses_a_call_tells_the_model() -> None:
    [seen] = called([bad("refuses")], ("echo", {}))
    assert (seen.observation, seen.is_error) == ("the server refused the call: never heard of it", True)


def test_a_result_that_is_none_of_the_protocol_costs_the_trajectory() -> None:
    with pytest.raises(RolloutError, match="'garbage' is gone"):
        called([bad("garbage")], ("echo", {}))


def test_a_name_that_no_model_can_call_is_refused() -> None:
    assert "cannot call a tool with the name 'has a space'" in refused(bad("unspeakable"))
    with pytest.raises(ConfigError, match="cannot call a tool"):
        names([plain("x" * 62, "add"), plain("b", "add")])


def test_a_server_that_ignores_the_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    server = bad("deaf", command=(sys.executable, MISBEHAVING, "deaf", str(pids)))
    started = time.monotonic()
    assert names([server]) == ["add", "echo"]
    assert time.monotonic() - started < 30
    numbers = [int(number) for number in pids.read_text().split()]
    assert len(numbers) == 2
    running = [n for n in numbers if psutil.pid_exists(n) and psutil.Process(n).status() != "zombie"]
    assert running == []


def test_a_trajectory_that_is_given_up_leaves_the_server() -> None:
    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> None:
        with anyio.move_on_after(0.3) as scope:
            await tools.call("wait", {"secs": 60})
        assert scope.cancelled_caught
        assert (await tools.call("add", {"a": 1, "b": 1})).observation == "2"

    use([McpServer(name="calc", command=CALCULATOR)], body)


def test_opening_that_is_given_up_leaves_no_process() -> None:
    before = set(psutil.Process().children(recursive=True))

    async def run() -> None:
        tools = McpTools([bad("silent"), plain("calc", "add")])
        with anyio.move_on_after(0.5) as scope:
            await tools.open()
        assert scope.cancelled_caught
        await tools.close()

    anyio.run(run)
    assert set(psutil.Process().children(recursive=True)) <= before
