"""Products with weights of any format that `gguf` can dequantise (IQ1 to IQ3, ternary, …), on the CPU.

A fallback: the weight is expanded to float32 and stays so in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from retrograd_hookspecs import ANY_FORMAT, BuildContext, Component, KernelImpl, NoConfig, hookimpl

from ._gemm_component import SOURCE


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """The ops on the preferred instruction set that the backend allows."""
    from ._decode import FORMATS
    from ._gemm import WeightOps
    from ._gemm_expanded import ExpandedOps
    from ._gemm_kernels import variant
    from ._gemm_workspace import Workspace

    backend = context.service("backend")
    name = backend.variants[0]
    load = partial(backend.shared, f"gemm.{name}", partial(variant, name))
    workspace = backend.shared("gemm.workspace", Workspace)
    ops = ExpandedOps(WeightOps(FORMATS["F32"], load, backend.device.threads, workspace))
    return [
        KernelImpl(op=op, format=ANY_FORMAT, fn=fn, variant="dequantise", fast=False)
        for op, fn in (
            ("matmul", ops.matmul),
            ("matmul_input_grad", ops.matmul_input_grad),
            ("embedding", ops.embedding),
        )
    ]


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.matmul_any`."""
    return [
        Component(
            name="cpu.matmul_any",
            config=NoConfig,
            build=build,
            summary="Products with weights of any other format, expanded to float32 in memory.",
            source=SOURCE,
            needs=("backend",),
        )
    ]
