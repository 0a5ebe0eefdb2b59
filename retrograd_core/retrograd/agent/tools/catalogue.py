"""The tools of a run: which toolsets its scenarios may have, and what is in each."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from retrograd.config import RawTable, raise_problems
from retrograd.config.messages import did_you_mean
from retrograd_hookspecs import BuildContext, ConfigError, PluginError, Problem, Tool, ToolSpec

from .components import ToolComponents
from .config import Tools
from .definitions import Definitions, PlacedTool, PlacedToolset
from .program import ProgramTool, load_program

TABLE = "agent.environment.tools"


@attrs.frozen(kw_only=True)
class CataloguedTool:
    """A tool with its identity. `origin` is `file:line` or the plugin that brings it, `digest` the SHA-256 of
    its definition, what the model sees of it, and its script."""

    label: str
    """`id@version`."""
    tool: Tool
    origin: str
    digest: str

    @property
    def spec(self) -> ToolSpec:
        """What the model sees."""
        return self.tool.spec


class ToolCatalogue:
    """The toolsets of a run, checked and made. Immutable."""

    def __init__(self, default: str, toolsets: Mapping[str, Sequence[CataloguedTool]]) -> None:
        self.default = default
        self._toolsets = {name: tuple(tools) for name, tools in toolsets.items()}

    @classmethod
    def load(
        cls, tools: Tools, components: ToolComponents, *, table: RawTable | None = None
    ) -> ToolCatalogue:
        """Collect all definitions, resolve the toolsets and make their tools.

        Args:
            table: the table that `tools` was read from, for places in messages; None for one made in Python.

        Raises:
            ConfigError: anything is wrong, with every problem found.
        """
        loader = _Loader(tools, components, table)
        return cls(tools.default, loader.load())

    @property
    def toolsets(self) -> tuple[str, ...]:
        """Names of the toolsets that scenarios may have, the default first."""
        return tuple(self._toolsets)

    def entries(self, name: str) -> Sequence[CataloguedTool]:
        """The tools of a toolset with their identities, in the order the model sees.

        Raises:
            ConfigError: scenarios cannot select the toolset.
        """
        try:
            return self._toolsets[name]
        except KeyError:
            hint = did_you_mean(name, self._toolsets) or _all(self._toolsets, "toolsets")
            message = f"no scenario can have the toolset {name!r}"
            add = f"{hint}; others are added to {TABLE}.scenario_toolsets"
            raise ConfigError([Problem(where="metadata.env.toolset", message=message, hint=add)]) from None

    def tools_of(self, name: str = "") -> Sequence[Tool]:
        """The tools of a toolset, "" for the default, in the order the model sees. Raises as `entries`."""
        return tuple(entry.tool for entry in self.entries(name or self.default))

    def specs(self) -> Mapping[str, Sequence[ToolSpec]]:
        """What the model sees, by toolset."""
        return {name: tuple(tool.spec for tool in tools) for name, tools in self._toolsets.items()}

    def signature(self) -> Mapping[str, Any]:
        """For the run's signature: the tools of each toolset by `id@version`, and the digest of each tool."""
        return {
            "default": self.default,
            "toolsets": {name: [tool.label for tool in tools] for name, tools in self._toolsets.items()},
            "tools": {tool.label: tool.digest for tools in self._toolsets.values() for tool in tools},
        }

    @property
    def catalogue_hash(self) -> str:
        """SHA-256 of `signature()`, hexadecimal: definitions, scripts and the composition of toolsets."""
        return digest(self.signature())


def catalogue_of(tools: Tools, context: BuildContext) -> ToolCatalogue:
    """The catalogue of an environment that is being built; its component needs the service
    `tool_components`. Raises as `ToolCatalogue.load`."""
    components: ToolComponents = context.service("tool_components")
    return ToolCatalogue.load(tools, components, table=context.config.table(TABLE))


class _Loader:
    def __init__(self, tools: Tools, components: ToolComponents, table: RawTable | None) -> None:
        self._tools = tools
        self._table = table
        self._components = components
        self._definitions = Definitions.collect(tools, components, table)
        self._problems = self._definitions.problems
        self._resolved: dict[str, tuple[PlacedTool, ...]] = {}
        self._made: dict[str, CataloguedTool | None] = {}

    def load(self) -> dict[str, tuple[CataloguedTool, ...]]:
        chosen: list[str] = []
        keys = [("default", self._tools.default)]
        keys += [(f"scenario_toolsets[{i}]", name) for i, name in enumerate(self._tools.scenario_toolsets)]
        for key, name in keys:
            if name in chosen:
                self._problems.append(self._problem(key, f"the toolset {name!r} is named already"))
            elif name in self._definitions.toolsets:
                chosen.append(name)
            elif name not in self._definitions.broken:
                known = self._definitions.toolsets
                hint = did_you_mean(name, known) or _all(known, "toolsets")
                self._problems.append(self._problem(key, f"there is no toolset {name!r}", hint))
        own = [name for name, placed in self._definitions.toolsets.items() if placed.table is not None]
        for name in (*chosen, *own):
            self._resolve(name, ())
        found = {name: self._make_all(self._resolved[name]) for name in chosen}
        for tool in self._definitions.all_tools():
            if tool.key:  # a mistake in a definition of the user's own counts, used or not
                self._make(tool)
        raise_problems(self._problems)
        return found

    def _problem(self, key: str, message: str, hint: str = "") -> Problem:
        if self._table is None:
            return Problem(where="Tools(...)", key=key, message=message, hint=hint)
        name = key.partition("[")[0]
        return Problem(
            where=self._table.where(name), key=f"{self._table.name}.{key}", message=message, hint=hint
        )

    def _resolve(self, name: str, above: tuple[str, ...]) -> tuple[PlacedTool, ...]:
        """The tools of a toolset in order; `above` are the toolsets that include it."""
        if name in self._resolved:
            return self._resolved[name]
        placed = self._definitions.toolsets[name]
        tools: list[PlacedTool] = []
        for index, other in enumerate(placed.definition.include):
            if other in (*above, name):
                cycle = " -> ".join([*(*above, name)[(*above, name).index(other) :], other])
                self._problems.append(
                    placed.problem("include", index, f"toolsets include each other: {cycle}")
                )
            elif other in self._definitions.toolsets:
                for tool in self._resolve(other, (*above, name)):
                    _put(tools, tool)
            elif other not in self._definitions.broken:
                known = self._definitions.toolsets
                hint = did_you_mean(other, known) or _all(known, "toolsets")
                self._problems.append(
                    placed.problem("include", index, f"there is no toolset {other!r}", hint)
                )
        for index, reference in enumerate(placed.definition.tools):
            found = self._find(placed, index, reference)
            if found is not None:
                _put(tools, found)
        tools = self._denied(placed, tools)
        self._resolved[name] = tuple(tools)
        return self._resolved[name]

    def _find(self, placed: PlacedToolset, index: int, reference: str) -> PlacedTool | None:
        id, at, version = reference.partition("@")
        versions = self._definitions.tools.get(id)
        if not versions:
            if id not in self._definitions.broken:
                message, hint = f"there is no tool {id!r}", self._nearest_tool(id)
                self._problems.append(placed.problem("tools", index, message, hint))
            return None
        if not at:
            return versions[-1]
        for tool in versions:
            if tool.definition.version == version:
                return tool
        known = ", ".join(tool.definition.version for tool in versions)
        self._problems.append(
            placed.problem("tools", index, f"there is no {reference}", f"versions of {id}: {known}")
        )
        return None

    def _nearest_tool(self, id: str) -> str:
        named = [tool.label for tool in self._definitions.all_tools() if tool.name == id]
        if named:
            return f"{id} is the name of {' and of '.join(named)}: write the id"
        return did_you_mean(id, self._definitions.tools) or _all(self._definitions.tools, "tools")

    def _denied(self, placed: PlacedToolset, tools: list[PlacedTool]) -> list[PlacedTool]:
        names = [tool.name for tool in tools]
        for index, pattern in enumerate(placed.definition.deny):
            if not fnmatch.filter(names, pattern) and not self._problems:
                hint = did_you_mean(pattern, names) or _all(names, "tools of the toolset")
                message = f"{pattern!r} denies no tool of this toolset"
                self._problems.append(placed.problem("deny", index, message, hint))
        patterns = placed.definition.deny
        return [tool for tool in tools if not any(fnmatch.fnmatchcase(tool.name, p) for p in patterns)]

    def _make_all(self, tools: Iterable[PlacedTool]) -> tuple[CataloguedTool, ...]:
        made = (self._make(tool) for tool in tools)
        return tuple(tool for tool in made if tool is not None)

    def _make(self, placed: PlacedTool) -> CataloguedTool | None:
        if placed.label not in self._made:
            self._made[placed.label] = self._build(placed)
        return self._made[placed.label]

    def _build(self, placed: PlacedTool) -> CataloguedTool | None:
        definition = placed.definition
        try:
            if definition.exec is not None:
                tool: Tool = load_program(definition)
            elif definition.builtin is not None:
                tool = self._factory(placed)
            else:
                return None  # reported with the definition
        except ConfigError as error:
            self._problems += [placed.problem(p.message, p.hint, p.key) for p in error.problems]
            return None
        script = tool.script_digest if isinstance(tool, ProgramTool) else ""
        identity = digest(
            {
                "definition": _without_paths(attrs.asdict(definition)),
                "spec": attrs.asdict(tool.spec),
                "script": script,
            }
        )
        return CataloguedTool(label=placed.label, tool=tool, origin=placed.where, digest=identity)

    def _factory(self, placed: PlacedTool) -> Tool:
        assert placed.definition.builtin is not None
        name = str(placed.definition.builtin.get("factory", ""))
        try:
            factory = self._components.factory(name)
        except PluginError as error:
            raise ConfigError([Problem(where="", key="builtin.factory", message=str(error))]) from error
        try:
            return factory.make(placed.definition)
        except ConfigError as error:
            raise ConfigError(
                attrs.evolve(p, key=f"builtin.params.{p.key}" if p.key else "builtin.params")
                for p in error.problems
            ) from error


def _all(names: Iterable[str], what: str) -> str:
    return f"{what}: {', '.join(sorted(names))}"


def _put(tools: list[PlacedTool], tool: PlacedTool) -> None:
    """Add a tool in place of those with its id or name, or at the end."""
    same = [i for i, t in enumerate(tools) if t.definition.id == tool.definition.id or t.name == tool.name]
    if not same:
        tools.append(tool)
        return
    tools[same[0]] = tool
    for index in reversed(same[1:]):
        del tools[index]


def _without_paths(definition: dict[str, Any]) -> dict[str, Any]:
    """A definition without the place of its script: what the script holds counts."""
    program = definition.get("exec")
    if program is None:
        return definition
    return {**definition, "exec": {**program, "script": program.get("script") is not None}}


def digest(value: Any) -> str:
    """SHA-256 of a JSON-compatible value, hexadecimal; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Mappings of other kinds than dict, and what TOML has beside JSON (dates)."""
    return dict(value) if isinstance(value, Mapping) else str(value)
