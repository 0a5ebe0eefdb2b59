"""docs/tools.md: every block on the page is run."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import attrs
import pytest

from retrograd.agent.mcp import McpServer, McpTools, load_mcp_config
from retrograd.agent.tools import ToolCatalogue, Tools
from retrograd.agent.tools.components import InstalledTools
from retrograd.assembly import assemble
from retrograd.config import Document, load_document, read_table
from retrograd_hookspecs import AuditFinding, StepResult

from .support import SubprocessSandbox, call, catalogue
from .test_mcp import use

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FILES: dict[str, str] = dict(
    re.findall(r"`(\w+\.(?:py|toml))`:\n\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
)
OTHERS = [text for _, text in BLOCKS if text not in FILES.values()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_block_is_known() -> None:
    assert sorted(FILES) == [
        "calculator_server.py",
        "check_answer.py",
        "count_lines.py",
        "tools.toml",
        "weather_tools.py",
    ]
    assert [text.split("\n")[0] for text in OTHERS] == [
        "retrograd tools list agent.toml",
        "[agent.environment]",
        "[agent.environment.tools]",
        "[[agent.mcp_servers]]",
        "{",
    ]


def tools_of(path: Path, text: str) -> ToolCatalogue:
    path.write_text(text)
    table = load_document(path).table("agent.environment.tools")
    read = read_table(Tools, table)
    assert read.value is not None
    return catalogue(read.value, table)


def test_the_toolset_of_the_first_table(tmp_path: Path) -> None:
    assert tools_of(tmp_path / "run.toml", OTHERS[1]).toolsets == ("python", "base")


def test_the_definition_file_and_its_programs(folder: Path, sandbox: SubprocessSandbox) -> None:
    tools = tools_of(folder / "run.toml", OTHERS[2])
    assert [entry.label for entry in tools.entries("rust")] == [
        "bash@2",
        "read_file@1",
        "edit_file@1",
        "list_dir@1",
        "grep@1",
        "submit@1",
        "count_lines@1",
        "check_answer@1",
    ]
    (sandbox.directory / "a.txt").write_text("1\n2\n3\n")
    assert call(sandbox, tools, "count_lines", path="a.txt") == StepResult(
        observation="exit code: 0\nstdout:\n3"
    )
    assert call(sandbox, tools, "check_answer", answer=41) == StepResult(observation="wrong", reward=0.0)
    assert call(sandbox, tools, "check_answer", answer=42) == StepResult(
        observation="right", reward=1.0, done=True
    )
    assert call(sandbox, tools, "bash", command="echo a").observation == "exit code: 0\nstdout:\na"


def test_every_factory_of_the_page_is_one() -> None:
    [line] = re.findall(r"`builtin` names a factory: (.*?)\. `bash`", PAGE, re.DOTALL)
    from .support import installed

    named = {name for name in re.findall(r"`(\w+)`", line) if name != "params"}
    assert named == set(installed().factory_names())


def test_the_plugin(sandbox: SubprocessSandbox) -> None:
    module = ModuleType("weather_tools")
    exec(compile(FILES["weather_tools.py"], "docs/tools.md", "exec"), vars(module))
    assembly = assemble(Document.from_values({"model": {"path": "package:none"}}), algorithm=False)
    assembly.session.register(module, "weather:weather_tools", "1.0")
    tools = ToolCatalogue.load(Tools("weather"), InstalledTools(assembly))
    assert [entry.label for entry in tools.entries("weather")] == ["forecast@1", "submit@1"]
    assert call(sandbox, tools, "forecast", city="Bern") == StepResult(observation="sunny in Bern")
    assert call(sandbox, tools, "forecast", city="4") == StepResult(
        observation="city must be a name", is_error=True
    )


def test_the_calculator(folder: Path) -> None:
    [table] = tomllib.loads(OTHERS[3])["agent"]["mcp_servers"]
    server = McpServer(**{**table, "command": (sys.executable, str(folder / "calculator_server.py"))})
    assert table["command"] == ["python3", "calculator_server.py"]

    async def body(tools: McpTools, findings: Sequence[AuditFinding]) -> StepResult:
        assert [spec.name for spec in tools.specs()] == ["add", "multiply"]
        return await tools.call("multiply", {"a": 6, "b": 7})

    assert use([server], body).observation == "42"


def test_the_file_of_an_editor(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(OTHERS[4])
    servers, disabled = load_mcp_config(path, {})
    calc = McpServer(
        name="calc",
        command=("python3", f"{tmp_path}/calculator_server.py"),
        env={"MODE": "exact"},
        stateless=True,
    )
    assert (list(servers), list(disabled)) == ([calc], ["search"])
    assert attrs.asdict(servers[0])["required"] is True
