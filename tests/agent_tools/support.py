"""A real sandbox of subprocesses, and the tools of a run, for tests of tools."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import attrs

from retrograd.agent.tools import InstalledTools, ToolCatalogue, Tools
from retrograd.assembly import assemble
from retrograd.config import Document, RawTable
from retrograd_hookspecs import ExecResult, StepResult, ToolsetDefinition

MAX_OUTPUT_BYTES = 1 << 16
_ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # those of the developer take seconds to load
}


@attrs.define
class SubprocessSandbox:
    """Implements `retrograd_hookspecs.Sandbox` in two directories of the host."""

    directory: Path
    scratch: str
    timeout_secs: float = 20.0
    max_output_bytes: int = MAX_OUTPUT_BYTES

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_secs: float | None = None
    ) -> ExecResult:
        return await anyio.to_thread.run_sync(
            self._exec, list(argv), stdin, timeout_secs or self.timeout_secs
        )

    def _exec(self, argv: list[str], stdin: bytes, timeout_secs: float) -> ExecResult:
        process = subprocess.Popen(
            argv,
            cwd=self.directory,
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        late = False
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_secs)
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        most = self.max_output_bytes
        return ExecResult(
            exit_code=process.returncode,
            stdout=stdout[:most],
            stderr=stderr[:most],
            timed_out=late,
            truncated=max(len(stdout) - most, 0) + max(len(stderr) - most, 0),
        )

    async def read(self, path: str, *, limit: int) -> bytes:
        with (self.directory / path).open("rb") as file:
            return file.read(limit)

    async def write(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    async def close(self) -> None:
        pass


@attrs.frozen
class OwnTools:
    """`ToolComponents` of the installed plugins with further toolsets."""

    installed: InstalledTools
    more: tuple[tuple[str, ToolsetDefinition], ...] = ()

    def toolsets(self) -> Sequence[tuple[str, ToolsetDefinition]]:
        return (*self.installed.toolsets(), *self.more)

    def factory_names(self) -> Sequence[str]:
        return self.installed.factory_names()

    def factory(self, name: str) -> Any:
        return self.installed.factory(name)


def installed() -> InstalledTools:
    """The toolsets and factories that are installed here."""
    return InstalledTools(
        assemble(Document.from_values({"model": {"path": "package:none"}}), algorithm=False)
    )


def catalogue(
    tools: Tools, table: RawTable | None = None, *more: tuple[str, ToolsetDefinition]
) -> ToolCatalogue:
    """The catalogue of a run."""
    return ToolCatalogue.load(tools, OwnTools(installed(), more), table=table)


def call(sandbox: Any, tools: ToolCatalogue, name: str, toolset: str = "", **arguments: Any) -> StepResult:
    """Call a tool as the player does: arguments are checked first."""
    from retrograd.agent.arguments import validate_arguments

    [tool] = [tool for tool in tools.tools_of(toolset) if tool.spec.name == name]
    problem = validate_arguments(tool.spec, arguments)
    if problem is not None:
        return StepResult(observation=problem, is_error=True)

    async def run() -> StepResult:
        return await tool.call(sandbox, arguments)

    return anyio.run(run)
