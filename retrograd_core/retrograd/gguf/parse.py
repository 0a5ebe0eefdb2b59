"""Parsing one GGUF file: header, metadata, tensor table. Tensor data is mapped, never read.

`gguf.GGUFReader` is not used: it builds several NumPy arrays per vocabulary entry, which takes 4 s for 49,152
tokens and 15 s for 262,144; here it is 0.05 and 0.3 s. Constants and block layouts are `gguf`'s.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs
import numpy as np
import numpy.typing as npt
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_VERSION, GGUFValueType

from retrograd_hookspecs import ModelError

from .formats import FORMATS_BY_ID, BlockFormat

_VERSIONS = (2, GGUF_VERSION)
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4
_SCALARS: Mapping[int, np.dtype[Any]] = {
    int(GGUFValueType.UINT8): np.dtype("u1"),
    int(GGUFValueType.INT8): np.dtype("i1"),
    int(GGUFValueType.UINT16): np.dtype("<u2"),
    int(GGUFValueType.INT16): np.dtype("<i2"),
    int(GGUFValueType.UINT32): np.dtype("<u4"),
    int(GGUFValueType.INT32): np.dtype("<i4"),
    int(GGUFValueType.FLOAT32): np.dtype("<f4"),
    int(GGUFValueType.UINT64): np.dtype("<u8"),
    int(GGUFValueType.INT64): np.dtype("<i8"),
    int(GGUFValueType.FLOAT64): np.dtype("<f8"),
    int(GGUFValueType.BOOL): np.dtype("?"),
}
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
_AGAIN = "download or copy it again"


@attrs.frozen(kw_only=True)
class StoredTensor:
    """An entry of the tensor table; `offset` counts from the start of the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    layout: BlockFormat
    offset: int
    bytes: int


@attrs.frozen(eq=False, kw_only=True)
class ParsedFile:
    """One GGUF file. `data` is its bytes, uint8, read-only, mapped."""

    path: Path
    data: npt.NDArray[np.uint8]
    metadata: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    """Where the type tag and payload of each metadata value lie in the file."""
    tensors: list[StoredTensor]
    alignment: int


def parse_file(path: Path, formats: Mapping[int, BlockFormat] = FORMATS_BY_ID) -> ParsedFile:
    """Parse the GGUF at `path`, whose tensors have these formats, ggml's by default.

    Raises `ModelError` that says what is wrong, where, and how to mend it.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise ModelError(f"{path}: the file is empty; {_AGAIN}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        scheme = _SCHEME.match(str(path))
        hint = (
            f"if {scheme[0]!r} is meant as a locator, no installed plugin knows it"
            " (built in: package:, pypi:, hf:)"
            if scheme
            else "check the path of the model"
        )
        raise ModelError(f"{path}: there is no such file; {hint}") from None
    except IsADirectoryError:
        raise ModelError(f"{path}: this is a directory; give the path of a .gguf file in it") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot open: {error.strerror or error}") from error
    return _Parser(path, mapped, formats).parse()


class _Parser:
    """A cursor over the mapped bytes; `what` says what is being read, for messages."""

    def __init__(self, path: Path, mapped: mmap.mmap, formats: Mapping[int, BlockFormat]) -> None:
        self._path = path
        self._formats = formats
        self._bytes = mapped
        self._size = len(mapped)
        self._at = 0
        self._what = "the header"

    def parse(self) -> ParsedFile:
        tensor_count, pair_count = self._header()
        metadata: dict[str, Any] = {}
        spans: dict[str, tuple[int, int]] = {}
        for index in range(pair_count):
            self._what = f"metadata entry {index + 1} of {pair_count}"
            key = self._text()
            self._what = f"metadata {key}"
            if key in metadata:
                self._fail("the key occurs twice", "convert the model again")
            start = self._at
            metadata[key] = self._value(self._integer("<I"))
            spans[key] = (start, self._at)
        alignment = self._alignment(metadata)
        entries = [self._tensor_entry(index, tensor_count) for index in range(tensor_count)]
        data_start = self._at + -self._at % alignment
        return ParsedFile(
            path=self._path,
            data=np.frombuffer(self._bytes, dtype=np.uint8),
            metadata=metadata,
            spans=spans,
            tensors=self._place(entries, data_start, alignment),
            alignment=alignment,
        )

    def _header(self) -> tuple[int, int]:
        magic = self._take(4)
        if magic != b"GGUF":
            self._fail(
                f"the file begins with {magic!r} instead of b'GGUF'",
                "give a GGUF model (other formats are converted with llama.cpp's convert_hf_to_gguf.py)",
            )
        version = self._integer("<I")
        if version & 0xFFFF == 0 and version:
            self._fail(
                "the file is big-endian",
                "convert it with `gguf-convert-endian MODEL little` of the gguf package",
            )
        if version not in _VERSIONS:
            self._fail(
                f"GGUF version {version} is not supported (supported: {', '.join(map(str, _VERSIONS))})",
                "convert the model again with a current llama.cpp",
            )
        tensor_count, pair_count = self._integer("<Q"), self._integer("<Q")
        # An entry takes at least 24 bytes, a pair 13: larger counts are damage, not something to allocate.
        if tensor_count * 24 + pair_count * 13 > self._size:
            self._fail(
                f"it announces {tensor_count} tensors and {pair_count} metadata entries, more than"
                f" {self._size} bytes can hold",
                f"the file is damaged: {_AGAIN}",
            )
        return tensor_count, pair_count

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._what = "metadata general.alignment"
            self._fail(f"{alignment!r} is not a power of two", "convert the model again")
        return alignment

    def _tensor_entry(self, index: int, count: int) -> StoredTensor:
        self._what = f"tensor table, entry {index + 1} of {count}"
        name = self._text()
        self._what = f"tensor {name}"
        dimensions = self._integer("<I")
        if not 0 < dimensions <= _MAX_DIMENSIONS:
            self._fail(f"it has {dimensions} dimensions", f"the file is damaged: {_AGAIN}")
        shape = tuple(self._integer("<Q") for _ in range(dimensions))[::-1]
        if 0 in shape:
            self._fail(f"its shape is {shape}", f"the file is damaged: {_AGAIN}")
        type_id = self._integer("<I")
        layout = self._formats.get(type_id)
        if layout is None:
            self._fail(
                f"tensor type {type_id} is unknown to the installed gguf package, and no plugin of the kind"
                " quants offers it",
                "`pip install -U gguf`, install the format's plugin, or convert the model to a common format"
                " such as Q8_0",
            )
        if shape[-1] % layout.block_size:
            self._fail(
                f"its rows of {shape[-1]} values are not whole {layout.name} blocks of {layout.block_size}",
                "convert the model again",
            )
        rows = 1
        for extent in shape[:-1]:
            rows *= extent
        size = rows * layout.row_bytes(shape[-1])
        return StoredTensor(name=name, shape=shape, layout=layout, offset=self._integer("<Q"), bytes=size)

    def _place(self, entries: list[StoredTensor], data_start: int, alignment: int) -> list[StoredTensor]:
        placed: list[StoredTensor] = []
        seen: set[str] = set()
        for entry in entries:
            self._what = f"tensor {entry.name}"
            if entry.name in seen:
                self._fail("the tensor occurs twice", "convert the model again")
            seen.add(entry.name)
            if entry.offset % alignment:
                self._fail(
                    f"its offset {entry.offset} is not a multiple of the alignment {alignment}",
                    f"the file is damaged: {_AGAIN}",
                )
            stop = data_start + entry.offset + entry.bytes
            if stop > self._size:
                self._fail(
                    f"its data ends at byte {stop}, but the file has only {self._size} bytes",
                    f"the file is truncated: {_AGAIN}",
                )
            placed.append(attrs.evolve(entry, offset=data_start + entry.offset))
        return placed

    def _value(self, kind: int, depth: int = 0) -> Any:
        dtype = _SCALARS.get(kind)
        if dtype is not None:
            return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind == GGUFValueType.ARRAY:
            return self._array(depth + 1)
        self._fail(
            f"value type {kind} is unknown", f"the file is damaged or newer than this program: {_AGAIN}"
        )

    def _array(self, depth: int) -> list[Any]:
        if depth > _MAX_NESTING:
            self._fail(f"arrays are nested more than {_MAX_NESTING} deep", f"the file is damaged: {_AGAIN}")
        kind, count = self._integer("<I"), self._integer("<Q")
        dtype = _SCALARS.get(kind)
        if dtype is not None:
            return list(np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist())
        if count * 8 > self._size - self._at:
            self._truncated(count * 8)
        if kind == GGUFValueType.STRING:
            return self._texts(count)
        return [self._value(kind, depth) for _ in range(count)]

    def _texts(self, count: int) -> list[str]:
        # The one hot loop of opening a model: a vocabulary has up to 262,144 entries.
        unpack = struct.Struct("<Q").unpack_from
        data, at, size = self._bytes, self._at, self._size
        out: list[str] = []
        for _ in range(count):
            if at + 8 > size:
                self._truncated(8)
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > size:
                self._at = start
                self._truncated(at - start)
            out.append(data[start:at].decode("utf-8", "surrogateescape"))
        self._at = at
        return out

    def _text(self) -> str:
        # surrogateescape: a few vocabularies hold bytes that are not UTF-8; they survive copying this way.
        return self._take(self._integer("<Q")).decode("utf-8", "surrogateescape")

    def _integer(self, layout: str) -> int:
        return int(struct.unpack(layout, self._take(struct.calcsize(layout)))[0])

    def _take(self, count: int) -> bytes:
        stop = self._at + count
        if stop > self._size:
            self._truncated(count)
        data = self._bytes[self._at : stop]
        self._at = stop
        return data

    def _truncated(self, count: int) -> NoReturn:
        self._fail(
            f"{count} bytes are needed at byte {self._at}, but the file has only {self._size}",
            f"the file is truncated or damaged: {_AGAIN}",
        )

    def _fail(self, problem: str, mend: str) -> NoReturn:
        raise ModelError(f"{self._path}: {self._what}: {problem}; {mend}")
