"""`grep`: search in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from retrograd.agent.tools import FunctionToolFactory, ToolFault
from retrograd_hookspecs import Component, NoConfig, Sandbox, StepResult, hookimpl, key

from ._files import checked_path
from ._programs import argument

_MISSING, _BAD_PATTERN = 44, 46
# Files are sorted before they are searched: what is cut does not depend on the order of a directory.
_SCRIPT = f"""
export LC_ALL=C.UTF-8
[ -e "$2" ] || exit {_MISSING}
printf '' | grep -E $3 -e "$1" >/dev/null 2>&1
[ $? -gt 1 ] && exit {_BAD_PATTERN}
find "$2" -name .git -prune -o -type f ${{4:+-name "$4"}} -print0 2>/dev/null | LC_ALL=C sort -z |
  xargs -0 -r grep -HnIZE $3 -e "$1" -- 2>/dev/null
exit 0
"""
_CUT = "[line cut]"


@attrs.frozen(kw_only=True)
class GrepParams:
    """Parameters of `grep`."""

    max_matches: int = key(200, minimum=1, doc="Most lines that are shown.")
    max_line_chars: int = key(500, minimum=20, doc="Most of one line.", unit="characters")


async def _grep(sandbox: Sandbox, arguments: Mapping[str, Any], params: GrepParams) -> StepResult:
    pattern = argument(arguments["pattern"], "pattern")
    path = checked_path(arguments.get("path", "."))
    files = argument(arguments.get("files", ""), "files")
    case = "-i" if arguments.get("ignore_case", False) else ""
    # A path that begins with a dash would be read as an option.
    place = f"./{path}" if path.startswith("-") else path
    result = await sandbox.exec(("sh", "-c", _SCRIPT, "sh", pattern, place, case, files))
    if result.exit_code == _MISSING:
        raise ToolFault(f"there is no file or directory {path}")
    if result.exit_code == _BAD_PATTERN:
        raise ToolFault("pattern is not an extended regular expression")
    if result.timed_out:
        raise ToolFault("the search took too long: search in fewer files")
    if result.exit_code != 0:
        raise ToolFault("the search failed")
    lines = result.stdout.decode("utf-8", errors="replace").split("\n")
    if result.truncated:
        lines.pop()  # it may be half a line
    found = [_shown(line, params.max_line_chars) for line in lines if line]
    shown = found[: params.max_matches]
    if result.truncated:
        shown.append("[and more]")
    elif len(found) > len(shown):
        shown.append(f"[and {len(found) - len(shown)} more]")
    return StepResult(observation="\n".join(shown) or "no matches")


def _shown(line: str, most: int) -> str:
    name, _, rest = line.partition("\0")
    number, _, text = rest.partition(":")
    text = f"{text[:most]} {_CUT}" if len(text) > most else text
    return f"{name.removeprefix('./')}:{number}:{text}"


FACTORY = FunctionToolFactory(
    description="Search files for lines that match an extended regular expression. Shows file, line number"
    " and line, sorted by file. Binary files and .git are left out.",
    properties={
        "pattern": {"type": "string", "minLength": 1, "description": "Extended regular expression."},
        "path": {
            "type": "string",
            "description": "File, or directory that is searched with all below it. Default: the working"
            " directory.",
        },
        "files": {"type": "string", "description": "Search only files whose name matches, such as *.py."},
        "ignore_case": {
            "type": "boolean",
            "description": "Upper and lower case are the same. Default: false.",
        },
    },
    required=("pattern",),
    params=GrepParams,
    function=_grep,
)


@hookimpl
def retrograd_tool_factories() -> list[Component[NoConfig, Any]]:
    """`grep`."""
    return [
        Component(
            name="grep",
            config=NoConfig,
            build=lambda config, context: FACTORY,
            summary="Search in files.",
        )
    ]
