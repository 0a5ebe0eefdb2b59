"""Lion, the optimizer that evolution found: the sign of an interpolated momentum.

u = sign(β1·m + (1 − β1)·g);  θ ← θ − lr·(u + λ·θ);  m ← β2·m + (1 − β2)·g

Use it with a tenth of AdamW's learning rate and ten times its weight decay::

    [training]
    optimizer = "lion"
    lr = 1e-5

    [optimizer.lion]
    beta1 = 0.9
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from retrograd_hookspecs import BuildContext, Component, Optimizer, Parameter, hookimpl, key


@attrs.frozen(kw_only=True)
class LionConfig:
    """Keys of `[optimizer.lion]`."""

    beta1: float = key(0.9, minimum=0.0, below=1.0, doc="Share of momentum in the update's direction.")
    beta2: float = key(0.99, minimum=0.0, below=1.0, doc="Decay of the momentum.")


class Lion:
    """Lion over float32 parameters; one momentum array each."""

    def __init__(self, config: LionConfig, weight_decay: float) -> None:
        self._config = config
        self._weight_decay = weight_decay
        self._momentum: dict[str, Any] = {}

    def step(self, parameters: Sequence[Parameter], lr: float, step: int) -> None:
        """Update every parameter in place."""
        import numpy as np

        beta1, beta2 = np.float32(self._config.beta1), np.float32(self._config.beta2)
        for parameter in parameters:
            momentum = self._momentum.setdefault(parameter.name, np.zeros_like(parameter.value))
            grad = np.asarray(parameter.grad, dtype=np.float32)
            direction = np.sign(beta1 * momentum + (1 - beta1) * grad)
            parameter.value -= np.float32(lr) * (direction + np.float32(self._weight_decay) * parameter.value)
            momentum *= beta2
            momentum += (1 - beta2) * grad

    def state(self) -> dict[str, Any]:
        """Momentum by parameter name."""
        return {name: momentum.copy() for name, momentum in self._momentum.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`."""
        self._momentum = {name: array.copy() for name, array in state.items()}

    def bytes_per_parameter(self) -> float:
        """One float32."""
        return 4.0


def _build(config: LionConfig, context: BuildContext) -> Optimizer:
    return Lion(config, context.config.training.weight_decay)


@hookimpl
def retrograd_optimizers() -> list[Component[LionConfig, Optimizer]]:
    """`lion`."""
    return [
        Component(
            name="lion",
            config=LionConfig,
            build=_build,
            summary="Sign of an interpolated momentum; half of AdamW's memory.",
            source="Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2",
        )
    ]
