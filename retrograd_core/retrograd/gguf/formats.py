"""Tensor formats: block layout, dequantisation, quantisation.

Layouts and arithmetic of ggml's are those of the `gguf` package, which mirrors ggml; a run has those that its
plugins of the kind `quants` offer (`format_table`), ggml's among them. A row of a matrix is a whole number of
blocks, so rows are self-contained in every format.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import QuantError
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize

from retrograd_hookspecs import ModelError, PluginError, Quant

# Formats that are plain arrays of one NumPy dtype.
_PLAIN: Mapping[str, Any] = MappingProxyType({"F32": np.float32, "F16": np.float16, "F64": np.float64})
_INTEGER_FORMATS = frozenset({"I8", "I16", "I32", "I64"})

# Activations are quantised to these at run time; weights never are, and `gguf` has no decoder.
_ACTIVATION_FORMATS = frozenset({"Q8_1", "Q8_K"})


@attrs.frozen(kw_only=True)
class BlockFormat:
    """One tensor format of ggml: `block_size` values are stored in `block_bytes` bytes."""

    name: str
    type_id: int
    """The number that stands for the format in a GGUF's tensor table."""
    block_size: int
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8.0 * self.block_bytes / self.block_size

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values; `ModelError` if they are not whole blocks."""
        if columns % self.block_size:
            raise ModelError(
                f"a row of {columns} values cannot be stored as {self.name}: its blocks hold"
                f" {self.block_size} values, so the width must be a multiple of that; choose another format"
            )
        return columns // self.block_size * self.block_bytes

    def dequantise(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Values of packed rows: uint8 (..., row bytes) to float32 (..., K), a new array.

        Raises `ModelError` for a format that has no decoder.
        """
        packed = np.ascontiguousarray(data)
        if self.name in _PLAIN:
            return np.array(packed.view(_PLAIN[self.name]), dtype=np.float32)
        if self.name in _INTEGER_FORMATS or self.name in _ACTIVATION_FORMATS:
            raise ModelError(f"format {self.name} does not hold weights; it cannot be dequantised")
        try:
            values = gguf_dequantize(packed, GGMLQuantizationType(self.type_id))
        except NotImplementedError:
            raise ModelError(
                f"the installed gguf package cannot dequantise {self.name}; update it with"
                " `pip install -U gguf`, or convert the model to a common format such as Q8_0"
            ) from None
        return np.asarray(values, dtype=np.float32)

    def quantise(self, values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint8]:
        """Packed rows of values: float (..., K) to uint8 (..., row bytes), a new array.

        Raises `ModelError` if K is not a multiple of the block size, a value does not fit F16, or the
        `gguf` package has no quantiser for the format (K-quants, IQ formats).
        """
        source = np.ascontiguousarray(values, dtype=np.float32)
        self.row_bytes(source.shape[-1])
        if self.name == "F16":
            with np.errstate(over="ignore"):
                halves = source.astype(np.float16)
            lost = np.isinf(halves) & np.isfinite(source)
            if lost.any():
                raise ModelError(
                    f"value {source[lost][0]:g} is outside the range of F16 (65504); use bf16 or f32 instead"
                )
            return halves.view(np.uint8)
        if self.name in _PLAIN:
            return source.astype(_PLAIN[self.name]).view(np.uint8)
        try:
            packed = gguf_quantize(source, GGMLQuantizationType(self.type_id))
        except (NotImplementedError, QuantError, KeyError):
            raise ModelError(
                f"the gguf package has no quantiser for {self.name}; write one of"
                f" {', '.join(quantisable_formats())}"
            ) from None
        return np.asarray(packed).view(np.uint8)


@attrs.frozen(kw_only=True)
class OfferedFormat(BlockFormat):
    """A format that a plugin offers."""

    quant: Quant

    def dequantise(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """See `BlockFormat.dequantise`."""
        return self.quant.dequantise(np.ascontiguousarray(data), self.name)

    def quantise(self, values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint8]:
        """See `BlockFormat.quantise`."""
        self.row_bytes(values.shape[-1])
        return self.quant.quantise(values, self.name)


def format_table(quants: Mapping[str, Quant]) -> Mapping[int, BlockFormat]:
    """The formats that plugins of the kind `quants` offer, by the number that stands for each in a GGUF.

    Raises `PluginError` if two of them offer the same number or name.
    """
    table: dict[int, BlockFormat] = {}
    owners: dict[int | str, str] = {}
    for owner, quant in quants.items():
        for name, layout in quant.formats.items():
            for key in (layout.type_id, name):
                if key in owners:
                    raise PluginError(
                        f"the tensor format {name} (type {layout.type_id}) of the quants {owner!r} has the"
                        f" {'name' if key == name else 'number'} of one of {owners[key]!r}; leave one out in"
                        f' [plugins] disable = ["quants.{owner}"]'
                    )
                owners[key] = owner
            table[layout.type_id] = OfferedFormat(
                name=name,
                type_id=layout.type_id,
                block_size=layout.values,
                block_bytes=layout.bytes,
                quant=quant,
            )
    return MappingProxyType(table)


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        kind.name: BlockFormat(name=kind.name, type_id=int(kind), block_size=size, block_bytes=width)
        for kind, (size, width) in GGML_QUANT_SIZES.items()
    }
)
"""Every format that the installed `gguf` package knows, by ggml type name ("Q4_K")."""

FORMATS_BY_ID: Mapping[int, BlockFormat] = MappingProxyType({f.type_id: f for f in FORMATS.values()})

FILE_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "F32": int(LlamaFileType.ALL_F32),
        "F16": int(LlamaFileType.MOSTLY_F16),
        "BF16": int(LlamaFileType.MOSTLY_BF16),
        "Q8_0": int(LlamaFileType.MOSTLY_Q8_0),
        "Q4_0": int(LlamaFileType.MOSTLY_Q4_0),
        "Q4_1": int(LlamaFileType.MOSTLY_Q4_1),
        "Q5_0": int(LlamaFileType.MOSTLY_Q5_0),
        "Q5_1": int(LlamaFileType.MOSTLY_Q5_1),
    }
)
"""`general.file_type` of a model whose matrices have this format."""


def block_format(name: str) -> BlockFormat:
    """The format called `name` (any case); `ModelError` lists what there is."""
    try:
        return FORMATS[name.upper()]
    except KeyError:
        raise ModelError(f"unknown tensor format {name!r}; known: {', '.join(sorted(FORMATS))}") from None


def dequantise(data: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.float32]:
    """Float32 values of packed rows of the format `name`; see `BlockFormat.dequantise`."""
    return block_format(name).dequantise(data)


def quantise(values: npt.NDArray[np.floating[Any]], name: str) -> npt.NDArray[np.uint8]:
    """Packed rows of the format `name`; see `BlockFormat.quantise`."""
    return block_format(name).quantise(values)


@cache
def dequantisable_formats() -> tuple[str, ...]:
    """Formats of weights that can be read, sorted."""
    return tuple(sorted(name for name in FORMATS if _works(name, "dequantise")))


@cache
def quantisable_formats() -> tuple[str, ...]:
    """Formats that can be written, sorted."""
    return tuple(sorted(name for name in FORMATS if _works(name, "quantise")))


def _works(name: str, operation: str) -> bool:
    # The package does not tell which formats it can decode or encode, so one block is tried. The
    # formats it lacks raise NotImplementedError before any arithmetic.
    layout = FORMATS[name]
    if name in _PLAIN:
        return True
    if name in _INTEGER_FORMATS or name in _ACTIVATION_FORMATS:
        return False
    kind = GGMLQuantizationType(layout.type_id)
    try:
        if operation == "quantise":
            gguf_quantize(np.ones((1, layout.block_size), np.float32), kind)
        else:
            gguf_dequantize(np.zeros((1, layout.block_bytes), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True
