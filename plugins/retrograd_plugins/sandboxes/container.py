"""Containers as sandboxes, in Docker or Podman. What a trajectory does in one reaches no other.

A container has no network unless it is allowed, no capability, a read-only root, a user that is not root, and
limits on processors, memory, processes, and output. `/work` and `/tmp` are in its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from retrograd_hookspecs import BuildContext, Component, SandboxProvider, hookimpl, key


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of one container."""

    cpus: float = key(1.0, minimum=0.01, doc="Processors.")
    memory_mb: int = key(
        1024, minimum=64, unit="MiB", doc="Memory, files in /work and /tmp included: up to 3/4 of it."
    )
    pids: int = key(256, minimum=16, doc="Processes and threads.")
    exec_timeout_secs: float = key(30.0, above=0.0, unit="seconds", doc="Deadline of a command.")
    max_output_bytes: int = key(
        65536, minimum=1024, unit="bytes", doc="Most that is kept of a command's stdout, and of its stderr."
    )


@attrs.frozen(kw_only=True)
class Pool:
    """Containers that live at once, and what is used again."""

    max_live: int = key(8, minimum=1, maximum=1024, doc="Containers alive at once; others wait for a place.")
    min_idle: int = key(0, minimum=0, doc="Containers kept ready.")
    reuse: Literal["never", "workspace"] = key(
        "never",
        doc="`workspace` recycles a container: all processes are killed, all files deleted, and looked for.",
    )
    max_leases_per_container: int = key(
        32, minimum=1, doc='Trajectories that one container serves with `reuse = "workspace"`.'
    )

    @min_idle.validator
    def _has_places(self, attribute: Any, value: int) -> None:
        if value > self.max_live:
            raise ValueError(f"must be at most max_live = {self.max_live}, got {value}")


@attrs.frozen(kw_only=True)
class ContainerSandboxConfig:
    """What an environment passes on from its own table."""

    image: str = key(doc="Container image.")
    dockerfile: str = key("", doc="Builds the image where it is missing; it is pulled otherwise.")
    allow_network: bool = key(False, doc="Allow outbound network.")
    cache_volume: str | None = key(None, doc="Volume that is mounted read-only.")
    cache_path: str = key("/cache", doc="Where it is mounted.")
    environment: Mapping[str, str] = key(factory=dict, doc="Environment variables.")
    limits: Limits = key(factory=Limits, doc="Limits of one container.")
    pool: Pool = key(factory=Pool, doc="Containers that live at once.")


def _build(config: ContainerSandboxConfig, context: BuildContext) -> SandboxProvider:
    from ._containers import Containers

    return Containers(config, context.service("reporter").status)


@hookimpl
def retrograd_sandboxes() -> list[Component[ContainerSandboxConfig, SandboxProvider]]:
    """`container`."""
    return [
        Component(
            name="container",
            config=ContainerSandboxConfig,
            build=_build,
            summary="A container a trajectory, in Docker or Podman.",
            source="Docker Engine API 1.41",
            needs=("reporter",),
            extra="container",
            requires=("docker",),
        )
    ]
