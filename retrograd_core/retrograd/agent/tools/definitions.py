"""Definitions of tools and toolsets from all their sources, with the place of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from packaging.version import InvalidVersion, Version

from retrograd.config import RawTable, load_document, read_table
from retrograd.config.document import join_key
from retrograd_hookspecs import ConfigError, Problem, ToolDefinition, ToolsetDefinition

from .components import ToolComponents
from .config import DefinitionFile, ExecEntry, ToolEntry, Tools, ToolsetEntry

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@attrs.frozen(kw_only=True)
class PlacedTool:
    """A tool definition. `where` is `file:line` or the plugin that brings it, `key` the key in the file."""

    definition: ToolDefinition
    version: Version
    where: str
    key: str = ""

    @property
    def label(self) -> str:
        """`id@version`."""
        return f"{self.definition.id}@{self.definition.version}"

    @property
    def name(self) -> str:
        """As the model calls it."""
        return self.definition.name or self.definition.id

    def problem(self, message: str, hint: str = "", key: str = "") -> Problem:
        """A problem of this definition."""
        dotted = f"{self.key}.{key}" if self.key and key else self.key or self.label
        return Problem(where=self.where, key=dotted, message=message, hint=hint)


@attrs.frozen(kw_only=True)
class PlacedToolset:
    """A toolset definition, and where it is; `table` if it is of a file."""

    definition: ToolsetDefinition
    where: str
    table: RawTable | None = None

    def problem(self, key: str, index: int, message: str, hint: str = "") -> Problem:
        """A problem of an element of one of its lists."""
        if self.table is None:
            return Problem(where=self.where, key=key, message=message, hint=hint)
        path = (*self.table.path, key, index)
        return Problem(
            where=self.table.document.origin(path).where, key=join_key(path), message=message, hint=hint
        )


@attrs.define(kw_only=True)
class Definitions:
    """All definitions that a run knows, and what is wrong with them."""

    tools: dict[str, list[PlacedTool]] = attrs.field(factory=dict)
    """By id, oldest version first."""
    toolsets: dict[str, PlacedToolset] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)
    broken: set[str] = attrs.field(factory=set)
    """Ids and toolset names whose definitions cannot be read: what refers to them is not wrong itself."""

    @classmethod
    def collect(cls, tools: Tools, components: ToolComponents, table: RawTable | None) -> Definitions:
        """Read every source: plugins, then files, then inline definitions.

        Args:
            table: the table that `tools` was read from; None for one made in Python.
        """
        found = cls()
        for where, definition in components.toolsets():
            found._add_toolset(PlacedToolset(definition=definition, where=where))
            for tool in definition.definitions:
                found._add_tool(tool, where, "")
        for path in tools.files:
            found._read_file(Path(path))
        found._add_entries(tools.tool, tools.toolset, table)
        return found

    def all_tools(self) -> Iterator[PlacedTool]:
        """Every definition, sorted by id and version."""
        for id in sorted(self.tools):
            yield from self.tools[id]

    def _read_file(self, path: Path) -> None:
        try:
            document = load_document(path)
        except ConfigError as error:
            self.problems += error.problems
            return
        root = document.table("")
        read = read_table(DefinitionFile, root)
        self.problems += read.problems
        if not read.problems:
            self._add_entries(read.keys["tool"], read.keys["toolset"], root)
            return
        for name, kind in (("tool", ToolEntry), ("toolset", ToolsetEntry)):
            self._keep_readable(root.table(name), kind, root)

    def _keep_readable(self, table: RawTable, kind: type[Any], root: RawTable) -> None:
        """Of a file with mistakes, what is right, so that mistakes elsewhere are found too."""
        value = root.document.value(table.path)
        parts: Sequence[str | int] = list(value) if isinstance(value, Mapping) else range(len(value or ()))
        for part in parts:
            own = RawTable(root.document, (*table.path, part))
            read = read_table(kind, own)
            if read.value is None:
                self.broken.add(str(own.get("id", "")) if kind is ToolEntry else str(part))
            elif kind is ToolEntry:
                self._add_tool(_definition(read.value), own.where(), own.name)
            else:
                self._add_toolset(
                    PlacedToolset(definition=read.value.named(str(part)), where=own.where(), table=own)
                )

    def _add_entries(
        self,
        entries: Sequence[ToolEntry],
        toolsets: Mapping[str, ToolsetEntry],
        table: RawTable | None,
    ) -> None:
        for index, entry in enumerate(entries):
            where, key = "Tools(...)", f"tool[{index}]"
            if table is not None:
                own = RawTable(table.document, (*table.path, "tool", index))
                where, key = own.where(), own.name
            self._add_tool(_definition(entry), where, key)
        for name, toolset in toolsets.items():
            place = table.table("toolset").table(name) if table is not None else None
            where = place.where() if place is not None else "Tools(...)"
            self._add_toolset(PlacedToolset(definition=toolset.named(name), where=where, table=place))

    def _add_tool(self, definition: ToolDefinition, where: str, key: str) -> None:
        try:
            version = Version(definition.version)
        except InvalidVersion:
            self.broken.add(definition.id)
            self.problems.append(
                Problem(
                    where=where,
                    key=f"{key}.version" if key else definition.id,
                    message=f"{definition.version!r} is not a version",
                    hint='versions are "1", "1.2", "2.0rc1", …: they have to have an order',
                )
            )
            return
        placed = PlacedTool(definition=definition, version=version, where=where, key=key)
        self.problems += _faults(placed)
        others = self.tools.setdefault(definition.id, [])
        for other in others:
            if other.version == version:
                message = f"{placed.label} is defined already, by {other.where}"
                self.problems.append(placed.problem(message, "give this one another version or id"))
                return
        others.append(placed)
        others.sort(key=lambda tool: tool.version)

    def _add_toolset(self, placed: PlacedToolset) -> None:
        name = placed.definition.name
        other = self.toolsets.get(name)
        if other is None:
            self.toolsets[name] = placed
            return
        key = join_key(placed.table.path) if placed.table is not None else name
        self.problems.append(
            Problem(
                where=placed.where,
                key=key,
                message=f"the toolset {name!r} is defined already, by {other.where}",
                hint="give this one another name; it may include the other",
            )
        )


def _definition(entry: ToolEntry) -> ToolDefinition:
    return ToolDefinition(
        id=entry.id,
        version=entry.version,
        name=entry.name,
        description=entry.description,
        input_schema=entry.input_schema,
        builtin=attrs.asdict(entry.builtin) if entry.builtin is not None else None,
        exec=_exec(entry.exec) if entry.exec is not None else None,
    )


def _exec(entry: ExecEntry) -> dict[str, object]:
    return {
        "argv": list(entry.argv),
        "script": str(entry.script) if entry.script is not None else None,
        "protocol": entry.protocol,
        "timeout_secs": entry.timeout_secs,
    }


def _faults(placed: PlacedTool) -> Iterator[Problem]:
    definition = placed.definition
    if not _ID.fullmatch(definition.id):
        yield placed.problem(
            f"{definition.id!r} is no id", "letters, digits, _, - and ., such as cargo_test", "id"
        )
    elif not _NAME.fullmatch(placed.name):
        yield placed.problem(
            f"{placed.name!r} cannot be called by a model",
            "give a name of at most 64 letters, digits, _ and -",
            "name",
        )
    if (definition.builtin is None) == (definition.exec is None):
        both = "both builtin and exec" if definition.exec is not None else "neither builtin nor exec"
        yield placed.problem(f"has {both}", "a tool is made by a factory or runs a program: give one")
    if definition.exec is not None:
        if not definition.description.strip():
            yield placed.problem(
                "required key is missing", "tell the model what the tool does", "description"
            )
        yield from _schema_faults(placed)
    elif definition.input_schema:
        yield placed.problem(
            "a tool with builtin has the arguments that its factory reads",
            "leave input_schema out",
            "input_schema",
        )


def _schema_faults(placed: PlacedTool) -> Iterator[Problem]:
    import jsonschema

    schema = placed.definition.input_schema
    if not schema:
        return
    if schema.get("type") != "object":
        yield placed.problem(
            f"must be the schema of an object, got type {schema.get('type')!r}",
            'write type = "object" and list the arguments in properties',
            "input_schema",
        )
        return
    try:
        jsonschema.Draft202012Validator.check_schema(dict(schema))
    except jsonschema.SchemaError as error:
        place = ".".join(str(part) for part in error.absolute_path)
        at = f" at {place}" if place else ""
        yield placed.problem(f"is no JSON Schema{at}: {error.message}", "", "input_schema")
