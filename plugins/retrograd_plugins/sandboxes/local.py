"""A temporary directory of this host as a sandbox, without isolation: for trusted models and for trying out.

Commands run as the user who runs retrograd, with all that the user may do. The model is shown the directory
as `/work`, and its own temporary directory as `/tmp`: those paths are translated in arguments, standard input
and output, but not inside files.
"""

from __future__ import annotations

import attrs

from retrograd_hookspecs import BuildContext, Component, SandboxProvider, hookimpl, key


@attrs.frozen(kw_only=True)
class LocalSandboxConfig:
    """What an environment passes on."""

    exec_timeout_secs: float = key(30.0, above=0.0, unit="seconds", doc="Deadline of a command.")
    max_output_bytes: int = key(
        65536, minimum=1024, unit="bytes", doc="Most that is kept of a command's stdout, and of its stderr."
    )


def _build(config: LocalSandboxConfig, context: BuildContext) -> SandboxProvider:
    from ._local import LocalSandboxes

    return LocalSandboxes(config)


@hookimpl
def retrograd_sandboxes() -> list[Component[LocalSandboxConfig, SandboxProvider]]:
    """`local`."""
    return [
        Component(
            name="local",
            config=LocalSandboxConfig,
            build=_build,
            summary="A temporary directory of this host, without isolation.",
        )
    ]
