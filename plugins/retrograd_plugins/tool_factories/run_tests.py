"""`run_tests`: the tests of a project."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from retrograd.agent.tools import FunctionToolFactory, command_text
from retrograd_hookspecs import Component, NoConfig, Sandbox, StepResult, hookimpl, key

from ._programs import ProgramParams, argument

_PYTEST = (
    *("env", "PYTHONHASHSEED=0", "python3", "-m", "pytest", "-q", "--no-header", "--color=no"),
    *("--tb=short", "-p", "no:cacheprovider"),
)
_NPM = ("env", "CI=1", "NO_COLOR=1", "npm_config_update_notifier=false", "npm", "test")
_FAILED = 1
"""Exit code of tests that failed: what the tool is there to tell, and no error of the tool."""

_DURATIONS = (
    re.compile(r" in \d+(\.\d+)?s( \(\d+:\d\d:\d\d\))?(?=\W*$)", re.MULTILINE),  # pytest, unittest
    re.compile(r" ?\(\d+(\.\d+)? ?(ms|s|m)\)"),  # mocha, jest, node
    re.compile(r" +\d+(\.\d+)?m?s$", re.MULTILINE),  # vitest
    re.compile(r"^.*\bduration_ms\b.*\n?", re.MULTILINE),  # node
    re.compile(r"^ *(Time:|Duration|Start at) .*\n?", re.MULTILINE),  # jest, vitest
    re.compile(r"^npm (error|ERR!) A complete log of this run .*\n(npm (error|ERR!) +/.*\n?)?", re.MULTILINE),
    re.compile(r"(?<=\b0x)[0-9a-f]{6,16}\b"),  # addresses of objects
)


@attrs.frozen(kw_only=True)
class RunTestsParams(ProgramParams):
    """Parameters of `run_tests`."""

    runner: Literal["pytest", "npm"] = key("pytest", doc="`pytest`, or `npm` for `npm test`.")


async def _run(sandbox: Sandbox, arguments: Mapping[str, Any], params: RunTestsParams) -> StepResult:
    target = argument(arguments.get("target", ""), "target")
    argv: tuple[str, ...] = _PYTEST if params.runner == "pytest" else _NPM
    if target:
        argv = (*argv, "--", target)
    result = await sandbox.exec(argv, timeout_secs=params.timeout_secs)
    steady = attrs.evolve(result, stdout=_steady(result.stdout), stderr=_steady(result.stderr))
    return StepResult(
        observation=command_text(steady, params.max_output_bytes),
        is_error=result.timed_out or result.exit_code not in (0, _FAILED),
    )


def _steady(output: bytes) -> bytes:
    """Without durations, paths of logs and addresses, which differ from run to run."""
    text = output.decode("utf-8", errors="replace")
    for pattern in _DURATIONS:
        text = pattern.sub("", text)
    return text.encode()


def _description(params: RunTestsParams) -> str:
    what = "the tests with pytest" if params.runner == "pytest" else "`npm test`"
    return f"Run {what}. Shows exit code and output, without durations."


FACTORY = FunctionToolFactory(
    description=_description,
    properties={
        "target": {"type": "string", "description": "File, directory or test to run. Default: all tests."}
    },
    params=RunTestsParams,
    function=_run,
)


@hookimpl
def retrograd_tool_factories() -> list[Component[NoConfig, Any]]:
    """`run_tests`."""
    return [
        Component(
            name="run_tests",
            config=NoConfig,
            build=lambda config, context: FACTORY,
            summary="Run the tests of a project.",
        )
    ]
