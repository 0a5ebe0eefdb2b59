"""Weights, products and their references for the tests of the CPU kernels."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.gguf.formats import dequantise
from retrograd.testing.quants import random_weights
from retrograd_hookspecs import QuantMatrix
from retrograd_plugins.kernels.cpu._decode import FORMATS
from retrograd_plugins.kernels.cpu._gemm import WeightOps
from retrograd_plugins.kernels.cpu._gemm_kernels import variant
from retrograd_plugins.kernels.cpu._gemm_workspace import Workspace
from retrograd_plugins.kernels.cpu._simd_features import TILE_VARIANTS, usable_variants

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

load_variant = cache(variant)


def all_variants() -> tuple[str, ...]:
    """Instruction sets of products that this machine can run, those included that must be asked for."""
    usable = usable_variants()
    return (*usable, *(name for name in TILE_VARIANTS if name not in usable and TILE_VARIANTS[0] in usable))


def make_ops(format_name: str, variant_name: str, threads: int = 2) -> WeightOps:
    """The ops of a format on an instruction set, with scratch of their own."""
    return WeightOps(FORMATS[format_name], partial(load_variant, variant_name), threads, Workspace())


def make_weight(format_name: str, rows: int, columns: int, seed: int = 0) -> QuantMatrix:
    """Random read-only weights of standard deviation 0.05."""
    data = random_weights(np.random.default_rng(seed), rows, columns, format_name, 0.05)
    data.flags.writeable = False
    return QuantMatrix(name=f"random.{format_name}", format=format_name, data=data, columns=columns)


def halves(values: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """The halves that AMX makes of a float32 in forward products: the nearest, and the rest's upper bits."""

    def cut(single: Floats, added: int) -> Floats:
        return ((single.view(np.uint32) + np.uint32(added)) & np.uint32(0xFFFF0000)).view(np.float32)

    single = np.ascontiguousarray(values, np.float32)
    high = cut(single, 0x8000)
    return high, cut(single - high, 0)


def exact_product(x: Floats, weight: QuantMatrix, variant_name: str) -> Doubles:
    """x · Wᵀ in float64, of what the variant's multipliers see."""
    matrix = dequantise(weight.data, weight.format)
    if variant_name not in TILE_VARIANTS:
        return x.astype(np.float64) @ matrix.T.astype(np.float64)
    (x_high, x_low), (w_high, w_low) = (
        [half.astype(np.float64) for half in halves(values)] for values in (x, matrix)
    )
    if variant_name == "amx-bf16":
        return x_high @ w_high.T
    return x_low @ w_high.T + x_high @ (w_high + w_low).T


def rounded(values: npt.NDArray[Any], variant_name: str) -> Doubles:
    """Operands of gradients as the variant's multipliers see them, in float64: AMX rounds to bfloat16."""
    single = np.ascontiguousarray(values, np.float32)
    if variant_name not in TILE_VARIANTS:
        return single.astype(np.float64)
    bits = single.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return nearest.view(np.float32).astype(np.float64)


def exact_gradient(dout: Floats, weight: QuantMatrix, variant_name: str) -> Doubles:
    """dout · W in float64, of what the variant's multipliers see."""
    matrix = dequantise(weight.data, weight.format)
    return rounded(dout, variant_name) @ rounded(matrix, variant_name)


def normal(rows: int, columns: int, seed: int = 1) -> Floats:
    """Standard normal float32 values."""
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


def multiply(ops: WeightOps, x: Floats, weight: QuantMatrix) -> Floats:
    """x · Wᵀ in a new array that was full of NaN."""
    out = np.full((len(x), weight.rows), np.nan, np.float32)
    ops.matmul(x, weight, out)
    return out


def input_grad(ops: WeightOps, dout: Floats, weight: QuantMatrix) -> Floats:
    """dout · W in a new array that was full of NaN."""
    dx = np.full((len(dout), weight.columns), np.nan, np.float32)
    ops.matmul_input_grad(dout, weight, dx, False)
    return dx


def row_error(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Largest error of a row relative to its norm."""
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return float(error.max())
