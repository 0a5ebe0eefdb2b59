"""Contract of a trainable: `check_trainable(make, directory)` raises `AssertionError` where it is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from retrograd_hookspecs import ModelError, Parameter, Trainable

_STORED = {"f32": np.float32, "f16": np.float16}


def check_trainable(make: Callable[[], Trainable], directory: Path, *, seed: int = 0) -> None:
    """Check what every trainable promises. `make` gives a new one on a new model, `directory` is empty.

    Parameters in one order, with names of their own, float32 masters, gradients of their shape that begin
    at 0, and weights that are the masters rounded to the storage type; `refresh` follows the masters; what
    is saved is what was trained: loaded into a new instance, and saved by it again, it is the same; nothing
    else is left in the directory; a file that is no result is refused and changes nothing; the signature is
    JSON and the same for every instance.
    """
    trainable, other = make(), make()
    parameters = list(trainable.parameters)
    assert parameters, "nothing is trained"
    names = [parameter.name for parameter in parameters]
    assert len(set(names)) == len(names), "two parameters have the same name"
    assert names == [parameter.name for parameter in other.parameters], "the order of parameters changes"
    for parameter in parameters:
        _check_parameter(parameter)
    for first, second in zip(parameters, other.parameters, strict=True):
        assert first.value.tobytes() == second.value.tobytes(), f"{first.name} begins with other values"
    signature = trainable.signature()
    assert json.loads(json.dumps(signature)) == signature, "the signature is not plain JSON"
    assert signature == other.signature(), "the signature of a new instance is another one"
    assert trainable.summary().strip(), "summary() is empty"
    assert "\n" not in trainable.summary(), "summary() has more than one line"

    rng = np.random.default_rng(seed)
    for parameter in parameters:
        parameter.value += 0.05 * rng.standard_normal(parameter.value.shape).astype(np.float32)
    trainable.refresh()
    for parameter in parameters:
        _check_parameter(parameter)
    weights = _weights(trainable)
    result, again = directory / "result", directory / "again"
    trainable.save(result)
    assert _weights(trainable) == weights, "save() changed what is trained"
    assert [path.name for path in directory.iterdir()] == ["result"], "save() leaves further files"
    other.load(result)
    assert _weights(other) == weights, "what is loaded is not what was trained"
    other.save(again)
    assert again.read_bytes() == result.read_bytes(), "saved again it is another file"

    damaged = directory / "damaged"
    damaged.write_bytes(result.read_bytes()[: result.stat().st_size // 2])
    for path in (damaged, directory / "absent"):
        try:
            other.load(path)
        except ModelError:
            pass
        else:
            raise AssertionError(f"load() takes a file that is {path.name}")
        assert _weights(other) == weights, "load() of a file that it refuses changed what is trained"


def _check_parameter(parameter: Parameter) -> None:
    name, value = parameter.name, parameter.value
    assert value.dtype == np.float32, f"{name}: the master is {value.dtype}, not float32"
    assert np.isfinite(value).all(), f"{name}: values are not finite"
    grad, weight = np.asarray(parameter.grad), np.asarray(parameter.weight)
    assert grad.shape == value.shape, f"{name}: the gradient has the shape {grad.shape}, not {value.shape}"
    assert not grad.any(), f"{name}: the gradient does not begin at 0"
    stored = _STORED.get(parameter.dtype)
    if stored is not None:
        expected = value.astype(stored).astype(np.float32)
        assert np.array_equal(weight.astype(np.float32), expected), (
            f"{name}: the weight is not the master rounded to {parameter.dtype}"
        )


def _weights(trainable: Trainable) -> dict[str, Any]:
    return {p.name: np.asarray(p.weight).astype(np.float32).tobytes() for p in trainable.parameters}
