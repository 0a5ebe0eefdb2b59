"""The KL coefficient over a run: warm-up, and adaptation to a target."""

from __future__ import annotations

from typing import Any

import attrs

from retrograd_hookspecs import key

LARGEST_ERROR = 0.2
"""Relative distance to the target that counts at most."""
GAIN = 0.1
"""Share of that distance by which the coefficient changes in an update."""


def no_reference(run: Any) -> tuple[str, str]:
    """Message and hint for a kl_coefficient in a run whose base weights change, without a [reference]."""
    return (
        f'needs [reference] with training.trainable = "{run.training.trainable}": base weights change',
        "name the model to stay close to",
    )


@attrs.frozen(kw_only=True)
class KlScheduleConfig:
    """How kl_coefficient changes over the updates."""

    warmup_updates: int = key(
        0,
        minimum=0,
        unit="updates",
        doc="The coefficient rises from 0 to kl_coefficient over so many updates.",
    )
    target: float | None = key(
        None,
        above=0.0,
        unit="nats a token",
        doc="After the warm-up the coefficient grows while the KL to the reference is above this, and shrinks"
        " while it is below.",
        default_text="none: it stays",
    )


@attrs.define
class KlCoefficient:
    """The coefficient of the current update.

    β_{n+1} = β_n · (1 + 0.1 · clip(KL_n / target − 1, −0.2, 0.2))

    Source: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, equation 4 (there with a
    gain given by a horizon in samples).
    """

    base: float
    schedule: KlScheduleConfig = attrs.field(factory=KlScheduleConfig)
    scale: float = 1.0
    """Product of all adaptations so far."""

    def at(self, update: int) -> float:
        """The coefficient of an update (from 0)."""
        warmup = self.schedule.warmup_updates
        if update < warmup:
            return self.base * (update / warmup)
        return self.base * self.scale

    def observe(self, update: int, kl: float) -> None:
        """Adapt to the KL that was measured in an update."""
        target = self.schedule.target
        if target is None or update < self.schedule.warmup_updates:
            return
        error = min(max(kl / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        self.scale *= 1.0 + GAIN * error
