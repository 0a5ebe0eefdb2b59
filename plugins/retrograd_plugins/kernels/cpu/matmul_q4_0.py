"""Products with Q4_0 weights, and the embedding lookup, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import Component, hookimpl

from ._gemm_component import weight_component


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.matmul_q4_0`."""
    return [weight_component("Q4_0")]
