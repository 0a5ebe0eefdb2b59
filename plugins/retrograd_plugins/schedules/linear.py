"""Linear warm-up, then linear decay to zero by the end of the run.

lr(t) = lr·t/W for t ≤ W, then lr·(1 − (t − 1 − W)/(T − W))
with W `training.warmup_steps` and T the steps of the run. The last step has a
positive learning rate; zero is reached after it::

    [training]
    lr_scheduler = "linear"
    lr = 1e-4
    warmup_steps = 20
"""

from __future__ import annotations

from retrograd_hookspecs import BuildContext, Component, NoConfig, Schedule, hookimpl

from ._warmup import decaying


def _decay(progress: float) -> float:
    return 1.0 - progress


def _build(config: NoConfig, context: BuildContext) -> Schedule:
    return decaying("linear", context, _decay)


@hookimpl
def retrograd_schedules() -> list[Component[NoConfig, Schedule]]:
    """`linear`."""
    return [
        Component(
            name="linear",
            config=NoConfig,
            build=_build,
            summary="Linear warm-up, then a straight line to zero.",
            needs=("total_steps",),
        )
    ]
