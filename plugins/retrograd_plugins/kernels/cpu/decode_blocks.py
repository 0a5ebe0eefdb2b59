"""All decoder blocks of a model on a few tokens: the pass of fast decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd_hookspecs import BuildContext, Component, KernelImpl, NoConfig, hookimpl


def build(config: NoConfig, context: BuildContext) -> Sequence[KernelImpl]:
    """One function for all weight formats, on each instruction set that has `matmul_few`."""
    from ._few import products_kind
    from ._rows import ROWS_FORMATS
    from ._simd_features import has_half_conversion
    from ._stack import StackOps

    backend = context.service("backend")
    kernels: list[KernelImpl] = []
    for rank, name in enumerate(reversed(backend.variants)):
        kind = products_kind(name)
        if kind is None or not has_half_conversion():
            continue
        ops = StackOps(kind, backend.device.threads)
        kernels += [
            KernelImpl(
                op="decode_blocks",
                format=format_name,
                fn=ops.decode_blocks,
                priority=10 * (rank + 1),
                variant=name,
            )
            for format_name in ROWS_FORMATS
        ]
    return kernels


@hookimpl
def retrograd_kernels() -> Sequence[Component[Any, Any]]:
    """Offer `cpu.decode_blocks`."""
    return [
        Component(
            name="cpu.decode_blocks",
            config=NoConfig,
            build=build,
            summary="All decoder blocks on a few tokens in one call, for fast decoding.",
            source="The equations of the ops it fuses; see `retrograd_hookspecs.kernels`",
            needs=("backend",),
        )
    ]
