"""Adapters with known values, for tests of models and engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.nn import CausalLM, LoraFactors
from retrograd_hookspecs import Parameter

Factors = Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""By tensor name: A (rank, in) and B (out, rank)."""


def random_factors(model: CausalLM, *, rank: int, seed: int = 0) -> Factors:
    """Factors for every projection, none of them zero, so that gradients flow through all."""
    rng = np.random.default_rng(seed)
    factors = {}
    for name, projection in model.projections.items():
        rows, columns = projection.weight.shape
        a = rng.standard_normal((rank, columns)) / np.sqrt(columns)
        factors[name] = (a, rng.standard_normal((rows, rank)) * 0.1)
    return factors


def attach_factors(model: CausalLM, factors: Factors, *, scale: float) -> Sequence[Parameter]:
    """Put factors on a model's projections, in the compute dtype, replacing what was there.

    The parameters are called NAME.a and NAME.b; their `value` is the float32 rounding of their `weight`.
    """
    for projection in model.projections.values():
        projection.lora = None
    parameters: list[Parameter] = []
    for name, pair in factors.items():
        a, b = (
            _parameter(f"{name}.{suffix}", value, model) for suffix, value in zip("ab", pair, strict=True)
        )
        model.projections[name].lora = LoraFactors(a=a, b=b, scale=scale)
        parameters += [a, b]
    return parameters


def _parameter(name: str, value: npt.NDArray[Any], model: CausalLM) -> Parameter:
    backend = model.backend
    values = np.array(value, dtype=backend.compute_dtype, order="C")
    return Parameter(
        name=name,
        value=values.astype(np.float32),
        grad=backend.from_host(np.zeros_like(values)),
        weight=backend.from_host(values),
    )
