"""Descriptors of the kernels that read weights; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig

SOURCE = "ggml block layouts; Goto & van de Geijn 2008, Anatomy of high-performance matrix multiplication"


def weight_component(format_name: str) -> Component[Any, Any]:
    """The component `cpu.matmul_<format>`: the ops that read weights of one ggml format."""

    def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
        return weight_kernels(format_name, context.service("backend"))

    return Component(
        name=f"cpu.matmul_{format_name.lower()}",
        config=NoConfig,
        build=build,
        summary=f"Products with {format_name} weights as they lie in the file, and the embedding lookup.",
        source=SOURCE,
        needs=("backend",),
    )


def weight_kernels(format_name: str, backend: Any) -> Sequence[KernelImpl]:
    """The ops for `format_name`, once for each instruction set that the backend allows."""
    from ._decode import FORMATS
    from ._few import FewOps, products_kind
    from ._gemm import WeightOps
    from ._gemm_kernels import variant
    from ._gemm_workspace import Workspace
    from ._project import ProjectOps
    from ._simd_features import jit_disabled

    workspace = backend.shared("gemm.workspace", Workspace)
    kernels = []
    for rank, name in enumerate(reversed(backend.variants)):
        load = partial(backend.shared, f"gemm.{name}", partial(variant, name))
        ops = WeightOps(FORMATS[format_name], load, backend.device.threads, workspace)
        kernels += [
            KernelImpl(op=op, format=format_name, fn=fn, priority=10 * (rank + 1), variant=name)
            for op, fn in (
                ("matmul", ops.matmul),
                ("matmul_input_grad", ops.matmul_input_grad),
                ("embedding", ops.embedding),
            )
        ]
        formats = backend.shared(f"gemm.formats.{name}", dict)
        formats[format_name] = ops
        if not jit_disabled():
            make = partial(ProjectOps, formats.__getitem__, load, backend.device.threads, workspace)
            fused = backend.shared(f"gemm.project.{name}", make)
            kernels += [
                KernelImpl(op=op, format=format_name, fn=fn, priority=10 * (rank + 1), variant=name)
                for op, fn in (("project", fused.project), ("project_backward", fused.project_backward))
            ]
        kind = products_kind(name)
        if kind is not None:
            few = FewOps(ops, kind, backend.device.threads, workspace)
            kernels.append(
                KernelImpl(
                    op="matmul_few",
                    format=format_name,
                    fn=few.matmul_few,
                    priority=10 * (rank + 1),
                    variant=name,
                )
            )
    return kernels
