"""Needs a package that is not installed."""

from retrograd_hookspecs import Component, NoConfig, hookimpl


@hookimpl
def retrograd_sinks():
    return [
        Component(
            name="needs_a_package",
            config=NoConfig,
            build=lambda c, x: None,
            summary="",
            requires=("a_package_that_does_not_exist",),
        )
    ]
