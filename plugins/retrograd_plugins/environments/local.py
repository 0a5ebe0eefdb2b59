"""A directory of this host a trajectory, without isolation: the tools of `container` without an engine.

Minimal TOML::

    [agent.environment]
    type = "local"
    allow_unsandboxed = true
    [agent.environment.tools]
    default = "python"
"""

from __future__ import annotations

from typing import Any

import attrs

from retrograd.agent.tools import Tools
from retrograd_hookspecs import BuildContext, Component, EnvironmentProvider, hookimpl, key


@attrs.frozen
class LocalEnvironment:
    """Keys of `[agent.environment]` with `type = "local"`."""

    tools: Tools = key(doc="Toolsets.")
    allow_unsandboxed: bool = key(False, doc="Must be true: commands of the model run on this host.")
    setup_timeout_secs: float = key(
        300.0, above=0.0, unit="seconds", doc="Deadline of each command of a scenario's setup."
    )
    verify_timeout_secs: float | None = key(
        None, above=0.0, unit="seconds", doc="Deadline of a scenario's verify; what is late earns 0."
    )

    @allow_unsandboxed.validator
    def _is_allowed(self, attribute: Any, value: bool) -> None:
        if not value:
            raise ValueError(
                "must be true: commands of the model run on this host, without isolation, with all that you"
                ' may do; type = "container" isolates them'
            )


def _build(config: LocalEnvironment, context: BuildContext) -> EnvironmentProvider:
    from retrograd.agent.tools import catalogue_of

    from ._sandboxed import Deadlines, SandboxedProvider

    sandboxes = context.build("sandboxes", "local")
    deadlines = Deadlines(setup=config.setup_timeout_secs, verify=config.verify_timeout_secs)
    hint = "install what is missing on this host"
    return SandboxedProvider(sandboxes, catalogue_of(config.tools, context), deadlines, hint=hint)


@hookimpl
def retrograd_environments() -> list[Component[LocalEnvironment, EnvironmentProvider]]:
    """`local`."""
    return [
        Component(
            name="local",
            config=LocalEnvironment,
            build=_build,
            summary="A directory of this host a trajectory, without isolation.",
            needs=("tool_components",),
        )
    ]
