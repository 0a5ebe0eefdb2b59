"""`list_dir`: what is in a directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from retrograd.agent.tools import FunctionToolFactory, ToolFault
from retrograd_hookspecs import Component, NoConfig, Sandbox, StepResult, hookimpl, key

from ._files import checked_path

_MISSING, _NO_DIRECTORY = 44, 45
_SCRIPT = f"""
[ -e "$1" ] || [ -L "$1" ] || exit {_MISSING}
[ -d "$1" ] || exit {_NO_DIRECTORY}
exec ls -1Ap -- "$1"
"""


@attrs.frozen(kw_only=True)
class ListParams:
    """Parameters of `list_dir`."""

    max_entries: int = key(1000, minimum=1, doc="Most names that are shown.")


async def _list(sandbox: Sandbox, arguments: Mapping[str, Any], params: ListParams) -> StepResult:
    path = checked_path(arguments.get("path", "."))
    result = await sandbox.exec(("sh", "-c", _SCRIPT, "sh", path))
    if result.exit_code == _MISSING:
        raise ToolFault(f"there is no directory {path}")
    if result.exit_code == _NO_DIRECTORY:
        raise ToolFault(f"{path} is not a directory")
    if result.exit_code != 0 or result.timed_out:
        raise ToolFault(f"{path} cannot be listed")
    names = result.stdout.decode("utf-8", errors="replace").split("\n")
    if result.truncated:
        names.pop()  # it may be half a name
    names = sorted(name for name in names if name)
    shown = names[: params.max_entries]
    if result.truncated:
        shown.append("[and more]")
    elif len(names) > len(shown):
        shown.append(f"[and {len(names) - len(shown)} more]")
    return StepResult(observation="\n".join(shown) or "(empty)")


FACTORY = FunctionToolFactory(
    description="List what is in a directory, hidden files included, sorted by name. Directories end with a"
    " slash.",
    properties={
        "path": {"type": "string", "description": "Path of the directory. Default: the working directory."}
    },
    params=ListParams,
    function=_list,
)


@hookimpl
def retrograd_tool_factories() -> list[Component[NoConfig, Any]]:
    """`list_dir`."""
    return [
        Component(
            name="list_dir",
            config=NoConfig,
            build=lambda config, context: FACTORY,
            summary="List a directory.",
        )
    ]
