"""A container a trajectory: tools act in it, and a command of the scenario grades the result.

Minimal TOML::

    [agent.environment]
    type = "container"
    [agent.environment.tools]
    default = "python"
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from retrograd.agent.tools import Tools
from retrograd_hookspecs import BuildContext, Component, EnvironmentProvider, hookimpl, key
from retrograd_plugins.sandboxes.container import Limits, Pool

from ._sandboxed_profiles import PROFILES


@attrs.frozen
class ContainerEnvironment:
    """Keys of `[agent.environment]` with `type = "container"`; in Python,
    `environment=ContainerEnvironment(Tools("python"))`."""

    tools: Tools = key(doc="Toolsets.")
    profile: Literal["python", "typescript", "custom"] = key(
        "python", doc="Default image and package cache: `python`, `typescript` or `custom`."
    )
    image: str | None = key(
        None, doc="Container image; prefer a digest.", default_text="profile's; required with `custom`"
    )
    allow_network: bool = key(False, doc="Allow outbound network.")
    cache_volume: str | None = key(
        None,
        doc='Volume mounted read-only on the profile\'s package cache, so `reuse = "workspace"` installs once'
        " per run.",
    )
    setup_timeout_secs: float = key(
        300.0, above=0.0, unit="seconds", doc="Deadline of each command of a scenario's setup."
    )
    verify_timeout_secs: float | None = key(
        None, above=0.0, unit="seconds", doc="Deadline of a scenario's verify; what is late earns 0."
    )
    limits: Limits = key(factory=Limits, doc="Limits of one container.")
    pool: Pool = key(factory=Pool, doc="Containers that live at once.")

    @image.validator
    def _is_named(self, attribute: Any, value: str | None) -> None:
        if value is None and not PROFILES[self.profile].image:
            raise ValueError(f'must be given with profile = "{self.profile}"')
        if value is not None and (not value or value.split() != [value]):
            raise ValueError(f"must name an image, such as python:3.12, got {value!r}")


def _build(config: ContainerEnvironment, context: BuildContext) -> EnvironmentProvider:
    from retrograd.agent.tools import catalogue_of

    from ._sandboxed import Deadlines, SandboxedProvider

    profile = PROFILES[config.profile]
    environment = dict(profile.offline) if not config.allow_network else {}
    if config.cache_volume is not None:
        environment |= profile.cached
    image = config.image or profile.image
    sandboxes = context.build(
        "sandboxes",
        "container",
        image=image,
        dockerfile=profile.dockerfile if config.image is None else "",
        allow_network=config.allow_network,
        cache_volume=config.cache_volume,
        cache_path=profile.cache_path,
        environment=environment,
        limits=config.limits,
        pool=config.pool,
    )
    deadlines = Deadlines(setup=config.setup_timeout_secs, verify=config.verify_timeout_secs)
    hint = f"the image {image} must have what the tools of its toolset run"
    return SandboxedProvider(sandboxes, catalogue_of(config.tools, context), deadlines, hint=hint)


@hookimpl
def retrograd_environments() -> list[Component[ContainerEnvironment, EnvironmentProvider]]:
    """`container`."""
    return [
        Component(
            name="container",
            config=ContainerEnvironment,
            build=_build,
            summary="A container a trajectory, in Docker or Podman; graded by a command of the scenario.",
            needs=("tool_components",),
            extra="container",
            requires=("docker",),
        )
    ]
