"""`edit_file`: replace a part of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrograd.agent.tools import FunctionToolFactory, NoParams, ToolFault
from retrograd_hookspecs import Component, NoConfig, Sandbox, StepResult, hookimpl

from ._files import checked_path, read_text, write_text


async def _edit(sandbox: Sandbox, arguments: Mapping[str, Any], params: NoParams) -> StepResult:
    path = checked_path(arguments["path"])
    old, new = arguments["old_text"], arguments["new_text"]
    everywhere = arguments.get("replace_all", False)
    if not old:
        raise ToolFault("old_text is empty: give the text that is replaced")
    if old == new:
        raise ToolFault("old_text and new_text are the same: nothing would change")
    text = await read_text(sandbox, path)
    count = text.count(old)
    if count == 0:
        raise ToolFault(f"old_text does not occur in {path}")
    if count > 1 and not everywhere:
        raise ToolFault(
            f"old_text occurs {count} times in {path}: give more of the text around it, or set replace_all"
        )
    await write_text(sandbox, path, text.replace(old, new))
    return StepResult(observation=f"replaced {count} occurrence{'s' if count > 1 else ''} in {path}")


FACTORY = FunctionToolFactory(
    description="Replace a text in a file by another. The text must occur exactly once, unless replace_all is"
    " set.",
    properties={
        "path": {"type": "string", "description": "Path of the file."},
        "old_text": {"type": "string", "description": "The text to replace, exactly as it is in the file."},
        "new_text": {"type": "string", "description": "What stands in its place."},
        "replace_all": {"type": "boolean", "description": "Replace every occurrence. Default: false."},
    },
    required=("path", "old_text", "new_text"),
    params=NoParams,
    function=_edit,
)


@hookimpl
def retrograd_tool_factories() -> list[Component[NoConfig, Any]]:
    """`edit_file`."""
    return [
        Component(
            name="edit_file",
            config=NoConfig,
            build=lambda config, context: FACTORY,
            summary="Replace a part of a file.",
        )
    ]
