"""What installed plugins bring: toolsets with their tools, and factories of built-in tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from retrograd_hookspecs import KINDS, PluginError, ToolFactory, ToolsetDefinition

if TYPE_CHECKING:
    from retrograd.assembly import Assembly


class ToolComponents(Protocol):
    """Toolsets and tool factories that a run can name."""

    def toolsets(self) -> Sequence[tuple[str, ToolsetDefinition]]:
        """All toolsets, each with who brings it, sorted by name."""

    def factory_names(self) -> Sequence[str]:
        """Sorted."""

    def factory(self, name: str) -> ToolFactory:
        """Raises `PluginError` for a name that is not installed."""


@attrs.frozen(eq=False)
class InstalledTools:
    """The components of a run's plugins: the service `tool_components`.

    Every installed toolset is loaded, for a toolset of a configuration may name the tools of any.
    """

    assembly: Assembly

    def toolsets(self) -> Sequence[tuple[str, ToolsetDefinition]]:
        found: list[tuple[str, ToolsetDefinition]] = []
        for registered in self.assembly.session.components("toolsets"):
            name = registered.component.name
            definition: Any = self.assembly.build("toolsets", name)
            place = f"{KINDS['toolsets'].singular} {name!r} of {registered.distribution} {registered.version}"
            if not isinstance(definition, ToolsetDefinition) or definition.name != name:
                shown = getattr(definition, "name", type(definition).__name__)
                raise PluginError(f"{place}: build must give a ToolsetDefinition of that name, got {shown}")
            found.append((place, definition))
        return found

    def factory_names(self) -> Sequence[str]:
        return sorted(r.component.name for r in self.assembly.session.components("tool_factories"))

    def factory(self, name: str) -> ToolFactory:
        made: ToolFactory = self.assembly.build("tool_factories", name)
        return made
