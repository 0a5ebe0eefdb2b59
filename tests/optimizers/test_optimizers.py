"""AdamW and SGD against independent float64 implementations, and the contract of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrograd.kernel_table import FrozenKernelTable
from retrograd.testing.optimizers import check_optimizer
from retrograd_hookspecs import (
    BuildContext,
    CheckpointError,
    DeviceInfo,
    NoConfig,
    Optimizer,
    Parameter,
    TrainingError,
)
from retrograd_plugins.kernels.reference import optimizers as reference
from retrograd_plugins.optimizers.adamw import AdamW, AdamWConfig
from retrograd_plugins.optimizers.adamw import retrograd_optimizers as adamw_components
from retrograd_plugins.optimizers.sgd import Sgd, SgdConfig
from retrograd_plugins.optimizers.sgd import retrograd_optimizers as sgd_components

STEPS = 50


def kernels() -> FrozenKernelTable:
    context = BuildContext(config=None, base_dir=Path(), services={"backend": None})
    device = DeviceInfo(backend="reference", description="NumPy")
    return FrozenKernelTable(reference.build(NoConfig(), context), device)


def adamw(weight_decay: float = 0.0, **config: float) -> AdamW:
    return AdamW(AdamWConfig(**config), weight_decay=weight_decay, kernels=kernels())


def sgd(weight_decay: float = 0.0, **config: float) -> Sgd:
    return Sgd(SgdConfig(**config), weight_decay=weight_decay, kernels=kernels())


def parameter(name: str = "p", shape: tuple[int, ...] = (5, 7), seed: int = 0) -> Parameter:
    value = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return Parameter(name=name, value=value, grad=np.zeros_like(value), weight=value.copy())


def gradients(shape: tuple[int, ...]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Fifty gradients of very different sizes; one is zero."""
    rng = np.random.default_rng(99)
    made = [rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 2) for _ in range(STEPS)]
    made[20][...] = 0.0
    return [grad.astype(np.float32) for grad in made]


def rates() -> list[float]:
    return [0.01 * (1 + 0.5 * np.sin(step)) for step in range(STEPS)]


def run(optimizer: Optimizer) -> np.ndarray[Any, np.dtype[np.float32]]:
    p = parameter()
    for step, (grad, lr) in enumerate(zip(gradients(p.value.shape), rates(), strict=True), 1):
        p.grad[...] = grad
        optimizer.step([p], lr, step)
    return p.value


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("beta1", "beta2", "eps"), [(0.9, 0.999, 1e-8), (0.0, 0.95, 1e-3), (0.8, 0.0, 1e-6)])
def test_adamw_is_algorithm_2(weight_decay: float, beta1: float, beta2: float, eps: float) -> None:
    theta = parameter().value.astype(np.float64)
    moment = np.zeros_like(theta)
    square = np.zeros_like(theta)
    power1 = power2 = 1.0
    for grad, lr in zip(gradients(theta.shape), rates(), strict=True):
        g = grad.astype(np.float64)
        moment += (1.0 - beta1) * (g - moment)
        square += (1.0 - beta2) * (g**2 - square)
        power1 *= beta1
        power2 *= beta2
        theta = (1.0 - lr * weight_decay) * theta - lr * (moment / (1.0 - power1)) / (
            np.sqrt(square / (1.0 - power2)) + eps
        )
    ours = run(adamw(weight_decay, beta1=beta1, beta2=beta2, eps=eps))
    np.testing.assert_allclose(ours, theta, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_with_decoupled_decay(weight_decay: float, momentum: float) -> None:
    theta = parameter().value.astype(np.float64)
    velocity = np.zeros_like(theta)
    for grad, lr in zip(gradients(theta.shape), rates(), strict=True):
        velocity = momentum * velocity + grad.astype(np.float64)
        theta = theta - lr * velocity - lr * weight_decay * theta
    np.testing.assert_allclose(run(sgd(weight_decay, momentum=momentum)), theta, rtol=1e-4, atol=1e-5)


def test_first_step_of_adamw_by_hand() -> None:
    # m̂ = g and v̂ = g²: the first step is lr·sign(g), whatever the size of g.
    p = Parameter(
        name="p",
        value=np.array([1.0, -2.0], np.float32),
        grad=np.array([0.5, -300.0], np.float32),
        weight=np.zeros(2, np.float32),
    )
    adamw(weight_decay=0.5).step([p], 0.1, 1)
    np.testing.assert_allclose(
        p.value, [1.0 - 0.1 * (1 + 0.5 * 1.0), -2.0 - 0.1 * (-1 + 0.5 * -2.0)], rtol=1e-6
    )


@pytest.mark.parametrize("make", [adamw, sgd, lambda: sgd(momentum=0.9)], ids=["adamw", "sgd", "momentum"])
def test_contract(make: Callable[[], Optimizer]) -> None:
    check_optimizer(make)


def test_state_of_another_optimizer_is_refused() -> None:
    p = parameter()
    first = adamw()
    first.step([p], 0.1, 1)
    assert sorted(first.state()) == ["first_moment/p", "second_moment/p"]
    with pytest.raises(CheckpointError, match=r"was training\.optimizer changed"):
        sgd(momentum=0.9).load(first.state())
    with pytest.raises(CheckpointError, match="keeps nothing"):
        sgd().load(first.state())


def test_state_of_other_parameters_is_refused() -> None:
    first = adamw()
    first.step([parameter("a")], 0.1, 1)
    for other, message in (
        (parameter("b"), "holds no optimizer state 'first_moment/b'"),
        (parameter("a", (3, 3)), "has 35 values, the parameter 9"),
    ):
        second = adamw()
        second.load(first.state())
        with pytest.raises(CheckpointError, match=message):
            second.step([other], 0.1, 2)


def test_arrays_that_cannot_be_updated_in_place_are_refused() -> None:
    p = parameter()
    p.value = p.value.T
    p.grad = p.grad.T
    with pytest.raises(TrainingError, match=r"p: trained arrays must be C-contiguous"):
        adamw().step([p], 0.1, 1)


def test_infinite_momentum_does_not_reach_plain_sgd() -> None:
    p = parameter()
    optimizer = sgd()
    for grad in (np.inf, 1.0):
        before = p.value.copy()
        p.grad[...] = grad
        optimizer.step([p], 0.1, 1)
        p.value[...] = before if grad == np.inf else p.value
    assert np.isfinite(p.value).all()


def test_components_read_weight_decay_and_kernels() -> None:
    training = SimpleNamespace(weight_decay=0.25)
    context = BuildContext(
        config=SimpleNamespace(training=training), base_dir=Path(), services={"kernels": kernels()}
    )
    for (component,), config in ((adamw_components(), AdamWConfig()), (sgd_components(), SgdConfig())):
        assert component.needs == ("kernels",)
        p = parameter()
        before = p.value.copy()
        component.build(config, context).step([p], 0.1, 1)  # type: ignore[arg-type]
        np.testing.assert_allclose(p.value, before * (1 - 0.1 * 0.25), rtol=1e-6)


def test_contract_suite_finds_wrong_optimizers() -> None:
    class Aliasing(AdamW):
        def state(self) -> dict[str, Any]:
            return dict(self._moments._arrays)

    class Forgetful(AdamW):
        def load(self, state: Mapping[str, Any]) -> None:
            pass

    class Clearing(AdamW):
        def step(self, parameters: Sequence[Parameter], lr: float, step: int) -> None:
            super().step(parameters, lr, step)
            for p in parameters:
                p.grad[...] = 0

    class Boasting(AdamW):
        def bytes_per_parameter(self) -> float:
            return 4.0

    for wrong, message in (
        (Aliasing, "is not a copy"),
        (Forgetful, "gives another state"),
        (Clearing, "changed the gradient"),
        (Boasting, "promises"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_optimizer(lambda: wrong(AdamWConfig(), weight_decay=0.0, kernels=kernels()))  # noqa: B023


@pytest.mark.parametrize("make", [adamw, lambda: sgd(momentum=0.9)])
def test_parameters_of_one_buffer_are_updated_as_single_ones(make: Callable[[], Any]) -> None:
    rng = np.random.default_rng(0)
    values, grads = (rng.standard_normal(48).astype(np.float32) for _ in range(2))
    bounds = {"a": slice(0, 16), "b": slice(16, 48)}

    def parameters(copied: bool) -> list[Parameter]:
        return [
            Parameter(
                name=name,
                value=values[part].copy() if copied else values[part],
                grad=grads[part].copy() if copied else grads[part],
                weight=values[part],
            )
            for name, part in bounds.items()
        ]

    alone, joined = make(), make()
    apart, together = parameters(copied=True), parameters(copied=False)
    for step in (1, 2):
        alone.step(apart, 0.1, step)
        joined.step(together, 0.1, step)
    resumed = make()
    resumed.load(joined.state())
    alone.step(apart, 0.1, 3)
    resumed.step(together, 0.1, 3)
    for one, other in zip(apart, together, strict=True):
        np.testing.assert_array_equal(other.value, one.value)
    for name, state in alone.state().items():
        np.testing.assert_array_equal(resumed.state()[name], state)
