"""What tools that run a program share."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from retrograd.agent.tools import MAX_RESULT_BYTES, ToolFault, command_text
from retrograd_hookspecs import ExecResult, Sandbox, StepResult, key


@attrs.frozen(kw_only=True)
class ProgramParams:
    """Parameters of tools that run a program."""

    timeout_secs: float | None = key(
        None, above=0.0, doc="Deadline of a call.", unit="seconds", default_text="the sandbox's"
    )
    max_output_bytes: int = key(
        MAX_RESULT_BYTES, minimum=256, doc="Most that is shown of stdout, and of stderr.", unit="bytes"
    )


def argument(text: str, name: str) -> str:
    """A text that a program can be given as an argument. Raises `ToolFault`."""
    if "\0" in text:
        raise ToolFault(f"{name} must not hold a NUL character")
    return text


async def run_program(
    sandbox: Sandbox, argv: Sequence[str], params: ProgramParams, stdin: bytes = b""
) -> StepResult:
    """Run a program and show what it gave; an exit code other than 0 is an error."""
    result = await sandbox.exec(argv, stdin=stdin, timeout_secs=params.timeout_secs)
    return StepResult(observation=command_text(result, params.max_output_bytes), is_error=failed(result))


def failed(result: ExecResult) -> bool:
    """True for a program that did not end well."""
    return result.timed_out or result.exit_code != 0
