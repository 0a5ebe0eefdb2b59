"""Real MCP servers, over stdio and streamable HTTP: what is offered, called, filtered, and left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
import attrs
import psutil
import pytest

from retrograd.agent.mcp import McpServer, McpTools, mcp_tools
from retrograd_hookspecs import AuditFinding, ConfigError, RolloutError, StepResult

T = TypeVar("T")
HERE = Path(__file__).parent
CALCULATOR = (sys.executable, str(HERE / "calculator_server.py"))


def use(servers: Sequence[McpServer], body: Callable[[McpTools, Sequence[AuditFinding]], Awaitable[T]]) -> T:
    """Open the servers, use them, close them; no process is left."""
    before = set(psutil.Process().children(recursive=True))

    async def run() -> T:
        tools = mcp_tools(servers)
        assert tools is not None
        try:
            return await body(tools, await tools.open())
        finally:
            await tools.close()
            await tools.close()

    result = anyio.run(run)
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert left == []
    return result


def called(servers: Sequence[McpServer], *calls: tuple[str, dict[str, Any]]) -> list[StepResult]:
    """Results of calls, one after the other."""

    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> list[StepResult]:
        return [await tools.call(name, arguments) for name, arguments in calls]

    return use(servers, body)


def names(servers: Sequence[McpServer]) -> list[str]:
    """Tools that a model sees."""

    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> list[str]:
        return [spec.name for spec in tools.specs()]

    return use(servers, body)


def plain(name: str, *tools: str) -> McpServer:
    """A server that starts fast; its tools show its arguments."""
    return McpServer(
        name=name, command=(sys.executable, str(HERE / "misbehaving_server.py"), "plain", *tools)
    )


def test_a_server_of_our_own() -> None:
    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> list[StepResult]:
        assert [spec.name for spec in tools.specs()] == sorted(
            ["add", "crash", "directory", "divide", "picture", "process", "repeat", "variable", "wait"]
        )
        add = tools.specs()[0]
        assert (add.description, add.version) == ("Add two numbers.", "1.2")
        assert set(add.input_schema["properties"]) == {"a", "b"}
        assert [f.message for f in findings] == ["calc: 9 of 9 tools"]
        return [
            await tools.call("add", {"a": 37, "b": 5}),
            await tools.call("divide", {"a": 1, "b": 0}),
            await tools.call("picture", {}),
            await tools.call("add", {"a": "x"}),
        ]

    server = McpServer(name="calc", command=CALCULATOR)
    added, divided, picture, wrong = use([server], body)
    assert added == StepResult(observation="42")
    assert divided.is_error
    assert divided.observation.startswith("Error executing tool divide")
    assert picture.observation == "here it is\n[image image/png, 100 bytes]"
    assert wrong.is_error


def test_many_trajectories_call_at_a_time() -> None:
    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> float:
        async def one(number: int) -> None:
            seen = await tools.call("wait", {"secs": 0.5})
            assert seen.observation == "waited"
            seen = await tools.call("add", {"a": number, "b": 1})
            assert seen.observation == str(number + 1)

        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(one, number)
        return time.monotonic() - started

    assert use([McpServer(name="calc", command=CALCULATOR)], body) < 5


def test_a_run_uses_them_from_another_thread() -> None:
    """As the stage does: opened, called and closed in one event loop, each in a task of its own."""
    from anyio.from_thread import start_blocking_portal

    tools = McpTools([McpServer(name="calc", command=CALCULATOR)])
    with start_blocking_portal() as portal:
        portal.call(tools.open)
        futures = [portal.start_task_soon(tools.call, "add", {"a": n, "b": n}) for n in range(4)]
        assert [future.result().observation for future in futures] == ["0", "2", "4", "6"]
        portal.call(tools.close)


def test_a_long_result_is_cut() -> None:
    """100 MB in one message."""
    huge = attrs.evolve(
        plain("huge"),
        command=(*plain("huge").command[:-1], "huge"),  # type: ignore[index]
        tool_timeout_secs=120.0,
        max_tool_result_bytes=1000,
    )

    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> StepResult:
        return await tools.call("echo", {})

    assert use([huge], body).observation == "é" * 500 + "\n[cut: longer than 1000 bytes]"


def test_a_slow_call_is_given_up() -> None:
    late, after = called(
        [McpServer(name="calc", command=CALCULATOR, tool_timeout_secs=0.5)],
        ("wait", {"secs": 60}),
        ("add", {"a": 1, "b": 1}),
    )
    assert late == StepResult(observation="wait did not answer within 0.5 seconds", is_error=True)
    assert after.observation == "2"


def test_a_server_that_dies_costs_the_call_and_comes_back() -> None:
    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> None:
        first = await tools.call("process", {})
        errors: list[str] = []

        async def waiting() -> None:
            try:
                await tools.call("wait", {"secs": 60})
            except RolloutError as error:
                errors.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiting)
            await anyio.sleep(0.2)
            with pytest.raises(RolloutError, match="'calc' is gone") as gone:
                await tools.call("crash", {})
        assert "out of memory" in str(gone.value)
        assert len(errors) == 1
        again = [await tools.call("process", {}) for _ in range(2)]
        assert again[0] == again[1] != first

    use([McpServer(name="calc", command=CALCULATOR)], body)


def test_only_what_is_passed_on_reaches_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    monkeypatch.setenv("WANTED", "shown")
    monkeypatch.setenv("TOKEN", "t0k")
    server = McpServer(
        name="calc",
        command=CALCULATOR,
        env={"GIVEN": "Bearer ${TOKEN}"},
        env_passthrough=("WANTED",),
        cwd=tmp_path,
    )
    asked = ("SECRET", "WANTED", "GIVEN", "USER", "LOGNAME", "SHELL", "HOME", "PATH")
    *found, directory = called([server], *(("variable", {"name": name}) for name in asked), ("directory", {}))
    seen = dict(zip(asked, (result.observation for result in found), strict=True))
    assert seen == {
        **dict.fromkeys(("SECRET", "USER", "LOGNAME", "SHELL"), "(not set)"),
        "WANTED": "shown",
        "GIVEN": "Bearer t0k",
        "HOME": os.environ["HOME"],
        "PATH": os.environ["PATH"],
    }
    assert Path(directory.observation) == tmp_path
    [everything] = called([McpServer(name="calc", command=CALCULATOR)], ("variable", {"name": "SECRET"}))
    assert everything.observation == "hidden"


def test_deny_wins_and_clashes_get_the_servers_name() -> None:
    one = plain("one", "add", "divide", "directory", "repeat")
    one = attrs.evolve(one, allowed_tools=("add", "d*"), denied_tools=("dir*",))
    two = plain("my calc", "repeat", "add", "wait")
    two = attrs.evolve(two, denied_tools=("wait",))
    assert names([one, two]) == ["one__add", "divide", "my_calc__add", "repeat"]
    [seen] = called([one, two], ("my_calc__add", {}))
    assert seen.observation == "['repeat', 'add', 'wait']"
    with pytest.raises(ConfigError, match=r"'ad' is no tool of the server \(did you mean add\?\)"):
        names([attrs.evolve(two, denied_tools=("ad",))])


def test_what_the_model_sees_is_part_of_the_signature() -> None:
    async def signature(tools: McpTools, findings: Sequence[AuditFinding]) -> Mapping[str, Any]:
        return tools.signature()

    one, two = plain("one", "add"), plain("two", "repeat")
    seen = [use(servers, signature) for servers in ([one, two], [one, two], [two, one], [one])]
    assert seen[0] == seen[1]
    assert seen[0]["tools"] == seen[2]["tools"] != seen[3]["tools"]
    assert [found["order"] for found in seen[1:]] == [["add", "repeat"], ["repeat", "add"], ["add"]]


def test_names_that_clash_after_all_name_both_servers() -> None:
    one, two = plain("one", "add", "two__add"), plain("two", "add")
    with pytest.raises(
        ConfigError, match=r"MCP server 'two': the tool 'two__add' is offered by MCP server 'one'"
    ):
        names([one, two])


def test_the_time_server() -> None:
    server = McpServer(name="time", command=(sys.executable, "-m", "mcp_server_time"))
    arguments = {"source_timezone": "Europe/Berlin", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    right, wrong = called([server], ("convert_time", arguments), ("get_current_time", {"timezone": "Mars"}))
    assert json.loads(right.observation)["time_difference"] in ("+7.0h", "+8.0h")
    assert wrong.is_error


def test_the_git_server(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "new.txt").write_text("x")
    server = McpServer(
        name="git", command=(sys.executable, "-m", "mcp_server_git"), allowed_tools=("git_st*",)
    )
    [status] = called([server], ("git_status", {"repo_path": str(tmp_path)}))
    assert "new.txt" in status.observation


def test_the_filesystem_and_everything_servers(node_servers: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ä\n")
    files = McpServer(name="files", command=(str(node_servers / "mcp-server-filesystem"), str(tmp_path)))
    everything = McpServer(
        name="everything",
        command=(str(node_servers / "mcp-server-everything"), "stdio"),
        allowed_tools=("echo", "get-tiny-image", "get-resource-reference", "get-structured-content"),
    )
    read, outside, echo, image, resource, structured = called(
        [files, everything],
        ("read_text_file", {"path": str(tmp_path / "a.txt")}),
        ("read_text_file", {"path": "/etc/hostname"}),
        ("echo", {"message": "hé"}),
        ("get-tiny-image", {}),
        ("get-resource-reference", {"resourceType": "Text", "resourceId": 1}),
        ("get-structured-content", {"location": "Chicago"}),
    )
    assert read.observation == "ä\n"
    assert outside.is_error
    assert echo.observation == "Echo: hé"
    assert "[image image/png, " in image.observation
    assert "Resource 1" in resource.observation
    assert not structured.is_error
    assert "temperature" in structured.observation


@pytest.fixture
def http_server() -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Address of a calculator over streamable HTTP, and how it is stopped and started again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        running.append(subprocess.Popen([*CALCULATOR, str(port)], stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the server does not start")

    def stop() -> None:
        for process in running:
            process.kill()
            process.wait()
        running.clear()

    start()
    yield f"http://127.0.0.1:{port}/mcp", stop, start
    stop()


def test_a_remote_server_that_restarts(
    http_server: tuple[str, Callable[[], None], Callable[[], None]],
) -> None:
    address, stop, start = http_server

    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> None:
        assert (await tools.call("add", {"a": 1, "b": 2})).observation == "3"
        await anyio.to_thread.run_sync(stop)
        for _ in range(2):
            with pytest.raises(RolloutError, match="'far'"):
                await tools.call("add", {"a": 1, "b": 2})
        await anyio.to_thread.run_sync(start)
        assert (await tools.call("add", {"a": 2, "b": 2})).observation == "4"
        late = await tools.call("wait", {"secs": 60})
        assert late.observation == "wait did not answer within 2 seconds"

    async def run() -> None:
        tools = McpTools([McpServer(name="far", url=address, tool_timeout_secs=2.0)])
        try:
            await body(tools, await tools.open())
        finally:
            await tools.close()

    anyio.run(run)
