"""Constant learning rate after a linear warm-up.

lr(t) = lr·min(1, t/W)
with W `training.warmup_steps`::

    [training]
    lr_scheduler = "constant"
    lr = 1e-4
    warmup_steps = 20
"""

from __future__ import annotations

from retrograd_hookspecs import BuildContext, Component, NoConfig, Schedule, hookimpl

from ._warmup import constant


def _build(config: NoConfig, context: BuildContext) -> Schedule:
    return constant(context)


@hookimpl
def retrograd_schedules() -> list[Component[NoConfig, Schedule]]:
    """`constant`."""
    return [
        Component(
            name="constant",
            config=NoConfig,
            build=_build,
            summary="Linear warm-up, then training.lr.",
            needs=("total_steps",),
        )
    ]
