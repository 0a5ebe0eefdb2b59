"""Registers another name than its entry point promises."""

from retrograd_hookspecs import Component, NoConfig, hookimpl


@hookimpl
def retrograd_optimizers():
    return [Component(name="missnamed", config=NoConfig, build=lambda c, x: None, summary="")]
