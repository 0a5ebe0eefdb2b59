"""Stochastic gradient descent with momentum and decoupled weight decay.

b ← μ·b + g;  θ ← θ − lr·(b + λ·θ)

Without momentum (the default) it keeps no state::

    [training]
    optimizer = "sgd"
    lr = 0.1

    [optimizer.sgd]
    momentum = 0.9

Source: Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization, algorithm 1, with the learning
rate outside the momentum buffer and on the weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from retrograd_hookspecs import BuildContext, Component, KernelTable, Optimizer, Parameter, hookimpl, key

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from retrograd.parameter_runs import ParameterRun


@attrs.frozen(kw_only=True)
class SgdConfig:
    """Keys of `[optimizer.sgd]`."""

    momentum: float = key(0.0, minimum=0.0, below=1.0, doc="Momentum coefficient; 0 keeps no buffer.")


class Sgd:
    """SGD over float32 masters."""

    def __init__(self, config: SgdConfig, *, weight_decay: float, kernels: KernelTable) -> None:
        from retrograd.parameter_runs import ParameterRuns

        from ._moments import Moments

        self._momentum = config.momentum
        self._weight_decay = weight_decay
        self._moments = Moments(*(["momentum"] if config.momentum else []))
        self._update = kernels.get("sgd")
        self._runs = ParameterRuns()

    def step(self, parameters: Sequence[Parameter], lr: float, step: int) -> None:
        """Apply one update. Gradients are left as they are."""
        for run in self._runs.of(parameters):
            buffer = self._buffer(run)
            self._update(run.value, run.grad, buffer, lr, self._momentum, self._weight_decay)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """`momentum/NAME` of every parameter updated so far; nothing without momentum."""
        return self._moments.state()

    def load(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore `state()`. Raises `CheckpointError` if it is not of this optimizer."""
        self._moments.load(state)

    def bytes_per_parameter(self) -> float:
        """One float32 with momentum."""
        return 4.0 if self._momentum else 0.0

    def _buffer(self, run: ParameterRun) -> npt.NDArray[np.float32]:
        if self._momentum:
            return self._moments.of(run)[0]
        import numpy as np

        return np.zeros(run.value.size, np.float32)


def _build(config: SgdConfig, context: BuildContext) -> Optimizer:
    return Sgd(config, weight_decay=context.config.training.weight_decay, kernels=context.service("kernels"))


@hookimpl
def retrograd_optimizers() -> list[Component[SgdConfig, Optimizer]]:
    """`sgd`."""
    return [
        Component(
            name="sgd",
            config=SgdConfig,
            build=_build,
            summary="Stochastic gradient descent with momentum and decoupled weight decay.",
            source="Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization, algorithm 1",
            needs=("kernels",),
        )
    ]
