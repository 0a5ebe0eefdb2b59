"""Linear warm-up, then half a cosine down to zero by the end of the run.

lr(t) = lr·t/W for t ≤ W, then lr·(1 + cos(π·(t − 1 − W)/(T − W)))/2
with W `training.warmup_steps` and T the steps of the run. The last step has a
positive learning rate; zero is reached after it
(Loshchilov & Hutter 2017, SGDR, equation 5, without restarts)::

    [training]
    lr_scheduler = "cosine"
    lr = 1e-4
    warmup_steps = 20
"""

from __future__ import annotations

import math

from retrograd_hookspecs import BuildContext, Component, NoConfig, Schedule, hookimpl

from ._warmup import decaying


def _decay(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _build(config: NoConfig, context: BuildContext) -> Schedule:
    return decaying("cosine", context, _decay)


@hookimpl
def retrograd_schedules() -> list[Component[NoConfig, Schedule]]:
    """`cosine`."""
    return [
        Component(
            name="cosine",
            config=NoConfig,
            build=_build,
            summary="Linear warm-up, then half a cosine to zero.",
            source="Loshchilov & Hutter 2017, SGDR, equation 5, without restarts",
            needs=("total_steps",),
        )
    ]
