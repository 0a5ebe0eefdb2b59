"""Merging an adapter into its base model: a standalone GGUF.

Every tensor is dequantised, gets its delta added, and is written in the chosen format, a block of rows at a
time, so that memory stays bounded whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import ModelError, TensorInfo

from .adapter import Adapter, read_adapter
from .formats import FILE_TYPES, BlockFormat, block_format
from .reader import GGUFFile
from .writer import GGUFOutput, MetadataValue, TensorPlan

MergeFormat = Literal["f16", "bf16", "f32", "q8_0"]
MERGE_FORMATS: tuple[MergeFormat, ...] = ("f16", "bf16", "f32", "q8_0")

Progress = Callable[[int, int], None]
"""`progress(bytes written, bytes in all)`, after each block of rows."""

_VALUES_PER_BLOCK = 1 << 21  # 8 MiB of float32, several times that while quantising
# llama.cpp's own quantiser leaves these as they are: they are small and errors in them are costly.
_FULL_PRECISION = ("ffn_gate_inp.weight",)


@attrs.frozen(kw_only=True)
class MergeReport:
    """What `merge_adapter` wrote."""

    path: Path
    bytes: int
    """Size of the file."""
    merged: int
    """Tensors that the adapter changed."""
    notes: tuple[str, ...]
    """What a user should know: formats that were not possible, another base than the adapter's."""


def merge_adapter(
    base: GGUFFile,
    adapter: Adapter | Path,
    out: Path,
    *,
    dtype: MergeFormat,
    extra_metadata: Mapping[str, MetadataValue] | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Write `base` with `adapter` added in as a GGUF that llama.cpp runs alone, atomically.

    Matrices are stored as `dtype`; vectors (norms, biases) as F32; a tied embedding stays one tensor. A
    matrix whose width is not a multiple of 32 cannot be Q8_0 and becomes F16, with a note. All metadata is
    copied, except `general.file_type`.

    Raises `ModelError` if the adapter does not fit the base, a value does not fit the format, `out` is one of
    the inputs, or the disk is full.
    """
    if dtype not in MERGE_FORMATS:
        raise ModelError(f"merge format {dtype!r} is not one of {', '.join(MERGE_FORMATS)}")
    if not isinstance(adapter, Adapter):
        adapter = read_adapter(adapter)
    for source in (base.path, adapter.path):
        if out.exists() and source.exists() and out.samefile(source):
            raise ModelError(f"{out}: the merged model would replace {source}; give another output path")
    notes = [*adapter.notes, *adapter.check_base(base)]
    plans = [_plan(info, dtype, notes) for info in base.tensors.values()]
    total = sum(plan.bytes for plan in plans)
    written = 0
    with GGUFOutput(out, _metadata(base, dtype, extra_metadata), plans, alignment=base.alignment) as output:
        for plan in plans:
            output.write_parts(_reported(_rows(base, adapter, plan), written, total, progress))
            written += plan.bytes
    return MergeReport(path=out, bytes=out.stat().st_size, merged=len(adapter.factors), notes=tuple(notes))


def _plan(info: TensorInfo, dtype: MergeFormat, notes: list[str]) -> TensorPlan:
    kind = dtype.upper()
    if len(info.shape) == 1 or info.name.endswith(_FULL_PRECISION):
        kind = "F32"
    elif info.shape[-1] % block_format(kind).block_size:
        notes.append(f"{info.name}: its width {info.shape[-1]} does not fit {kind} blocks; written as F16")
        kind = "F16"
    return TensorPlan(name=info.name, shape=info.shape, format=kind)


def _metadata(
    base: GGUFFile, dtype: MergeFormat, extra: Mapping[str, MetadataValue] | None
) -> dict[str, MetadataValue]:
    out: dict[str, MetadataValue] = {
        key: base.raw_metadata(key) for key in base.metadata if not key.startswith("split.")
    }
    out["general.file_type"] = FILE_TYPES[dtype.upper()]
    out.setdefault("general.quantization_version", 2)
    return out | dict(extra or {})


def _rows(base: GGUFFile, adapter: Adapter, plan: TensorPlan) -> Iterator[npt.NDArray[np.uint8]]:
    source = base.layout(plan.name)
    target: BlockFormat = block_format(plan.format)
    packed = base.packed(plan.name)
    changed = plan.name in adapter.factors
    if source.name == target.name and not changed:
        yield packed
        return
    step = max(1, _VALUES_PER_BLOCK // plan.shape[-1])
    for first in range(0, packed.shape[0], step):
        stop = min(first + step, packed.shape[0])
        values = source.dequantise(packed[first:stop])
        if changed:
            values += adapter.delta(plan.name, first, stop)
        try:
            yield target.quantise(values)
        except ModelError as error:
            raise ModelError(f"{base.path}: {plan.name}: {error}") from None


def _reported(
    parts: Iterator[npt.NDArray[np.uint8]], written: int, total: int, progress: Progress | None
) -> Iterator[npt.NDArray[np.uint8]]:
    for part in parts:
        yield part
        written += part.nbytes
        if progress is not None:
            progress(written, total)
