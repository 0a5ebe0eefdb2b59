"""Keys of `[agent.environment.tools]` and of definition files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from retrograd_hookspecs import ToolsetDefinition, key


@attrs.frozen(kw_only=True)
class BuiltinEntry:
    """A tool that a component of the kind `tool_factories` makes."""

    factory: str = key(doc="Name of the factory: `bash`, `read_file`, `run_tests`, …")
    params: Mapping[str, Any] = key(factory=dict, doc="Parameters of the factory.")


@attrs.frozen(kw_only=True)
class ExecEntry:
    """A program that runs inside the sandbox; the arguments of a call are one JSON object on its stdin."""

    argv: tuple[str, ...] = key(
        (), doc="Command. `{script}` stands for the script; without it, the script's path comes last."
    )
    script: Path | None = key(
        None,
        doc="File that is copied into the sandbox, relative to the file of the definition. Without `argv`,"
        " its `#!` line says what runs it.",
    )
    protocol: Literal["text", "json"] = key(
        "text",
        doc="`text` shows exit code, stdout and stderr; with `json` the program prints one object"
        ' `{"content", "is_error"?, "reward"?, "done"?}`.',
    )
    timeout_secs: float | None = key(
        None, above=0.0, doc="Deadline of a call.", unit="seconds", default_text="the sandbox's"
    )

    @argv.validator
    def _runs_something(self, attribute: Any, value: tuple[str, ...]) -> None:
        if not value and self.script is None:
            raise ValueError("give argv, script, or both: there is nothing to run")
        if value and not value[0]:
            raise ValueError("the name of the program is empty")


@attrs.frozen(kw_only=True)
class ToolEntry:
    """One `[[tool]]`: a tool by `id@version`."""

    id: str = key(doc="Identifier; letters, digits, `_`, `-` and `.`.")
    version: str = key(doc='Version, such as `"1"` or `"1.2"`; the newest is taken where none is asked for.')
    name: str = key("", doc="Name by which the model calls it.", default_text="the id")
    description: str = key("", doc="What the model reads about it; required with `exec`.")
    input_schema: Mapping[str, Any] = key(
        factory=dict,
        doc="JSON Schema of the arguments, an object; with `builtin` the factory has one.",
        default_text="no arguments",
    )
    builtin: BuiltinEntry | None = key(None, doc="Made by a factory.", excluded_by="exec")
    exec: ExecEntry | None = key(None, doc="A program inside the sandbox.")


@attrs.frozen(kw_only=True)
class ToolsetEntry:
    """One `[toolset.NAME]`: included toolsets first, then `tools`, then `deny`."""

    include: tuple[str, ...] = key((), doc="Toolsets whose tools come first.")
    tools: tuple[str, ...] = key(
        (), doc="`id` (the newest version) or `id@version`; the same id or exposed name replaces."
    )
    deny: tuple[str, ...] = key((), doc="Exposed names that are left out; `*` is a wildcard.")

    def named(self, name: str) -> ToolsetDefinition:
        """As a component would give it."""
        return ToolsetDefinition(name=name, include=self.include, tools=self.tools, deny=self.deny)


@attrs.frozen
class Tools:
    """Tools of a sandbox environment: `Tools("python")`, `Tools("rust", files=("tools.toml",))`."""

    default: str = key(
        doc="Toolset of a scenario that names none (`base`, `python`, `typescript`, or one you define)."
    )
    scenario_toolsets: tuple[str, ...] = key(
        (),
        doc="Other toolsets a scenario may select with `metadata.env.toolset`.",
        default_text="none",
    )
    files: tuple[Path, ...] = key(
        (),
        doc="Definition files (`[[tool]]`, `[toolset.NAME]`), relative to this config.",
        default_text="none",
    )
    tool: tuple[ToolEntry, ...] = key((), doc="Inline tool definitions.", default_text="none")
    toolset: Mapping[str, ToolsetEntry] = key(factory=dict, doc="Inline toolsets.", default_text="none")


@attrs.frozen(kw_only=True)
class DefinitionFile:
    """A definition file as a whole."""

    tool: tuple[ToolEntry, ...] = key((), doc="Tool definitions.")
    toolset: Mapping[str, ToolsetEntry] = key(factory=dict, doc="Toolsets by name.")
