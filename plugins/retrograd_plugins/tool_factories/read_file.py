"""`read_file`: a text file, or some of its lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from retrograd.agent.tools import MAX_RESULT_BYTES, FunctionToolFactory, ToolFault, cap_text
from retrograd_hookspecs import Component, NoConfig, Sandbox, StepResult, hookimpl, key

from ._files import as_text, checked_path, read_bytes, read_text


@attrs.frozen(kw_only=True)
class ReadParams:
    """Parameters of `read_file`."""

    max_bytes: int = key(MAX_RESULT_BYTES, minimum=256, doc="Most that is shown of a file.", unit="bytes")


async def _read(sandbox: Sandbox, arguments: Mapping[str, Any], params: ReadParams) -> StepResult:
    path = checked_path(arguments["path"])
    first, last = arguments.get("first_line"), arguments.get("last_line")
    if first is None and last is None:
        most = params.max_bytes + 4  # more than is shown even without a character that is cut at the end
        data = await read_bytes(sandbox, path, most)
        text = as_text(data, path, cut=len(data) == most)
    else:
        text = _lines(await read_text(sandbox, path), path, first or 1, last)
    return StepResult(observation=cap_text(text, params.max_bytes) or "(empty)")


def _lines(text: str, path: str, first: int, last: int | None) -> str:
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if last is not None and last < first:
        raise ToolFault(f"last_line {last} is before first_line {first}")
    if first > max(len(lines), 1):
        raise ToolFault(f"{path} has only {len(lines)} line{'s' if len(lines) != 1 else ''}")
    return "\n".join(lines[first - 1 : last])


FACTORY = FunctionToolFactory(
    description="Read a text file, whole or from one line to another. A long file is cut, with a mark at its"
    " end.",
    properties={
        "path": {"type": "string", "description": "Path of the file."},
        "first_line": {"type": "integer", "minimum": 1, "description": "First line that is shown, from 1."},
        "last_line": {"type": "integer", "minimum": 1, "description": "Last line that is shown."},
    },
    required=("path",),
    params=ReadParams,
    function=_read,
)


@hookimpl
def retrograd_tool_factories() -> list[Component[NoConfig, Any]]:
    """`read_file`."""
    return [
        Component(
            name="read_file",
            config=NoConfig,
            build=lambda config, context: FACTORY,
            summary="Read a text file.",
        )
    ]
