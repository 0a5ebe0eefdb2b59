"""AdamW: Adam with decoupled weight decay.

m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²
θ ← θ − lr·( m / (1 − β1^t) / (√(v / (1 − β2^t)) + ε) + λ·θ )

Deviation: λ is multiplied by the learning rate of the schedule, as is usual, not by the schedule's
multiplier alone (the paper's η_t)::

    [training]
    optimizer = "adamw"
    weight_decay = 0.01

    [optimizer.adamw]
    beta2 = 0.99

Source: Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from retrograd_hookspecs import BuildContext, Component, KernelTable, Optimizer, Parameter, hookimpl, key

if TYPE_CHECKING:
    import numpy.typing as npt


@attrs.frozen(kw_only=True)
class AdamWConfig:
    """Keys of `[optimizer.adamw]`."""

    beta1: float = key(0.9, minimum=0.0, below=1.0, doc="Decay of the first moment.")
    beta2: float = key(0.999, minimum=0.0, below=1.0, doc="Decay of the second moment.")
    eps: float = key(1e-8, above=0.0, doc="Added to the root of the second moment.")


class AdamW:
    """AdamW over float32 masters; two float32 moments a value."""

    def __init__(self, config: AdamWConfig, *, weight_decay: float, kernels: KernelTable) -> None:
        from retrograd.parameter_runs import ParameterRuns

        from ._moments import Moments

        self._config = config
        self._weight_decay = weight_decay
        self._moments = Moments("first_moment", "second_moment")
        self._update = kernels.get("adamw")
        self._runs = ParameterRuns()

    def step(self, parameters: Sequence[Parameter], lr: float, step: int) -> None:
        """Apply update number `step` (from 1, for the bias correction). Gradients are left as they are."""
        config = self._config
        for run in self._runs.of(parameters):
            first, second = self._moments.of(run)
            self._update(
                run.value,
                run.grad,
                first,
                second,
                lr,
                config.beta1,
                config.beta2,
                config.eps,
                self._weight_decay,
                step,
            )

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """`first_moment/NAME` and `second_moment/NAME` of every parameter updated so far."""
        return self._moments.state()

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore `state()`. Raises `CheckpointError` if it is not of this optimizer."""
        self._moments.load(state)

    def bytes_per_parameter(self) -> float:
        """Two float32."""
        return 8.0


def _build(config: AdamWConfig, context: BuildContext) -> Optimizer:
    return AdamW(
        config, weight_decay=context.config.training.weight_decay, kernels=context.service("kernels")
    )


@hookimpl
def retrograd_optimizers() -> list[Component[AdamWConfig, Optimizer]]:
    """`adamw`."""
    return [
        Component(
            name="adamw",
            config=AdamWConfig,
            build=_build,
            summary="Adam with decoupled weight decay.",
            source="Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization, algorithm 2",
            needs=("kernels",),
        )
    ]
