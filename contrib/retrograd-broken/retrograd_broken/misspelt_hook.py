"""Implements a hook that does not exist."""

from retrograd_hookspecs import Component, NoConfig, hookimpl


@hookimpl
def retrograd_sinks():
    return [Component(name="misspelt_hook", config=NoConfig, build=lambda c, x: None, summary="")]


@hookimpl
def retrograd_step_finnished(run, report):
    pass
