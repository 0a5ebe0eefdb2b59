"""Contract of an optimizer: `check_optimizer(make)` raises `AssertionError` where it is broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from retrograd_hookspecs import Optimizer, Parameter


def check_optimizer(make: Callable[[], Optimizer], *, lr: float = 0.01, seed: int = 0) -> None:
    """Check what every optimizer promises. `make` gives a new instance, without weight decay.

    It lowers a quadratic; leaves gradients alone; does nothing at learning rate 0; stopped, saved, loaded
    into a new instance and continued it gives the same bytes as without the stop; its saved state is not
    changed by later steps and is as large as `bytes_per_parameter` says.
    """
    straight, optimizer = _parameters(seed), make()
    before = _loss(straight)
    _steps(optimizer, straight, lr, 1, 10)
    assert _loss(straight) < before, "ten steps did not lower a quadratic"
    _check_gradients_kept(make(), seed, lr)
    _check_zero_rate(make(), seed)
    _check_resume(make, straight, seed, lr)
    state = optimizer.state()
    values = sum(parameter.value.size for parameter in straight)
    stored = sum(array.nbytes for array in state.values())
    promised = optimizer.bytes_per_parameter() * values
    assert abs(stored - promised) <= 0.1 * promised + 64 * len(state), (
        f"state() holds {stored} bytes for {values} values, bytes_per_parameter() promises {promised:.0f}"
    )


def _check_resume(make: Callable[[], Optimizer], straight: Sequence[Parameter], seed: int, lr: float) -> None:
    stopped, first = _parameters(seed), make()
    _steps(first, stopped, lr, 1, 6)
    state = first.state()
    kept = {name: array.tobytes() for name, array in state.items()}
    saved = [parameter.value.copy() for parameter in stopped]
    _steps(first, stopped, lr, 7, 8)
    changed = [name for name, array in state.items() if array.tobytes() != kept[name]]
    assert not changed, f"state() of step 6 was changed by step 7: {changed[0]!r} is not a copy"
    second, resumed = make(), _parameters(seed)
    for parameter, value in zip(resumed, saved, strict=True):
        parameter.value[...] = value
    second.load(state)
    again = second.state()
    assert {n: a.tobytes() for n, a in again.items()} == kept, "load() then state() gives another state"
    _steps(second, resumed, lr, 7, 10)
    assert {n: a.tobytes() for n, a in state.items()} == kept, "load() must copy: a step changed its argument"
    for parameter, reference in zip(resumed, straight, strict=True):
        assert parameter.value.tobytes() == reference.value.tobytes(), (
            f"{parameter.name}: continuing from state() differs from not stopping"
        )


def _check_gradients_kept(optimizer: Optimizer, seed: int, lr: float) -> None:
    parameters = _parameters(seed)
    for parameter in parameters:
        parameter.grad[...] = _gradient(parameter, 1)
    kept = [parameter.grad.copy() for parameter in parameters]
    optimizer.step(parameters, lr, 1)
    for parameter, grad in zip(parameters, kept, strict=True):
        assert np.array_equal(parameter.grad, grad), f"step() changed the gradient of {parameter.name}"


def _check_zero_rate(optimizer: Optimizer, seed: int) -> None:
    parameters = _parameters(seed)
    before = [parameter.value.tobytes() for parameter in parameters]
    _steps(optimizer, parameters, 0.0, 1, 3)
    assert [p.value.tobytes() for p in parameters] == before, "learning rate 0 changed a value"


def _parameters(seed: int) -> list[Parameter]:
    """A matrix, a wide matrix and a vector around the minimum 0."""
    rng = np.random.default_rng(seed)
    parameters = []
    for name, shape in (("a", (8, 24)), ("b", (64, 8)), ("norm", (33,))):
        value = rng.standard_normal(shape).astype(np.float32)
        parameters.append(
            Parameter(name=name, value=value, grad=np.zeros_like(value), weight=value.copy(), dtype="f32")
        )
    return parameters


def _steps(optimizer: Optimizer, parameters: Sequence[Parameter], lr: float, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for parameter in parameters:
            parameter.grad[...] = _gradient(parameter, step)
        optimizer.step(parameters, lr, step)


def _gradient(parameter: Parameter, step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The gradient of ½‖θ‖² with a little noise that depends on the step alone."""
    noise = np.random.default_rng(step).standard_normal(parameter.value.shape).astype(np.float32)
    return parameter.value + np.float32(0.01) * noise


def _loss(parameters: Sequence[Parameter]) -> float:
    return sum(float(np.sum(parameter.value.astype(np.float64) ** 2)) for parameter in parameters) / 2
