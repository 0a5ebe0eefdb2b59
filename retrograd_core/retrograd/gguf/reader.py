"""A GGUF model or adapter, memory-mapped: metadata at once, weights when asked for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import ModelError, QuantMatrix, TensorInfo

from .fingerprint import fingerprint
from .formats import FORMATS_BY_ID, BlockFormat
from .parse import ParsedFile, StoredTensor, parse_file
from .writer import RawValue

_PART = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GGUFFile:
    """A GGUF. Implements `retrograd_hookspecs.ModelFile`.

    Opening parses metadata and the tensor table; no tensor data is read until it is used. Arrays handed
    out are read-only views of the mapping, which lives as long as any of them. A split model
    (`NAME-00001-of-00003.gguf`) is opened by any of its parts and appears as one.

    `formats` are those that tensors may have, by their numbers, ggml's by default.

    Raises `ModelError` for a file that is missing, truncated, damaged or of an unsupported kind.
    """

    def __init__(self, path: Path, formats: Mapping[int, BlockFormat] = FORMATS_BY_ID) -> None:
        self.path = path
        self._parts = _load_parts(path, formats)
        first = self._parts[0]
        self.metadata: Mapping[str, Any] = MappingProxyType(first.metadata)
        self.architecture = str(self.metadata.get("general.architecture", ""))
        self.alignment = first.alignment
        self._fingerprint: str | None = None
        self._stored: dict[str, tuple[ParsedFile, StoredTensor]] = {}
        for part in self._parts:
            for tensor in part.tensors:
                if tensor.name in self._stored:
                    other = self._stored[tensor.name][0].path.name
                    raise ModelError(
                        f"{part.path}: tensor {tensor.name} is also in {other}; the parts do not belong"
                        " together: download them again"
                    )
                self._stored[tensor.name] = (part, tensor)
        self._tensors = MappingProxyType(
            {
                name: TensorInfo(name=name, shape=entry.shape, format=entry.layout.name, bytes=entry.bytes)
                for name, (_, entry) in self._stored.items()
            }
        )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name, in file order."""
        return self._tensors

    def get(self, key: str, default: Any = None) -> Any:
        """`metadata["{architecture}.{key}"]`, or `default`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def matrix(self, name: str) -> QuantMatrix:
        """A 2-D weight as stored, uint8 (rows, row bytes), read-only; `ModelError` if missing or not 2-D."""
        info = self._info(name)
        if len(info.shape) != 2:
            raise ModelError(f"{self.path}: tensor {name} has shape {info.shape}; a matrix was expected")
        return QuantMatrix(
            name=name,
            format=info.format,
            data=self.packed(name),
            columns=info.shape[1],
            decode=self.layout(name).dequantise,
        )

    def layout(self, name: str) -> BlockFormat:
        """The format that a tensor is stored in."""
        self._info(name)
        return self._stored[name][1].layout

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A 1-D weight dequantised to float32 (n,), a copy; `ModelError` if missing or not 1-D."""
        info = self._info(name)
        if len(info.shape) != 1:
            raise ModelError(f"{self.path}: tensor {name} has shape {info.shape}; a vector was expected")
        return self.layout(name).dequantise(self.packed(name)[0])

    def packed(self, name: str) -> npt.NDArray[np.uint8]:
        """Any tensor as stored, uint8 (rows, row bytes), read-only; all leading dimensions are rows."""
        self._info(name)
        part, entry = self._stored[name]
        flat = part.data[entry.offset : entry.offset + entry.bytes]
        return flat.reshape(-1, entry.layout.row_bytes(entry.shape[-1]))

    def raw_metadata(self, key: str) -> RawValue:
        """A metadata value byte for byte, to be written to another GGUF with its exact type."""
        start, stop = self._parts[0].spans[key]
        return RawValue(self._parts[0].data[start:stop].tobytes())

    def fingerprint(self) -> str:
        """Hex SHA-256 of the file's bytes (what `sha256sum` prints; of a split model, of its parts in a row).

        Remembered in the user's cache, so that a file is read once and not in every run, and here, so that it
        is what was opened, and read once where there is no cache.
        """
        if self._fingerprint is None:
            self._fingerprint = fingerprint([part.path for part in self._parts])
        return self._fingerprint

    def _info(self, name: str) -> TensorInfo:
        try:
            return self._tensors[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._tensors, n=3)
            hint = f" (similar: {', '.join(near)})" if near else ""
            raise ModelError(f"{self.path}: there is no tensor {name}{hint}") from None


def open_model(path: str | Path, formats: Mapping[int, BlockFormat] = FORMATS_BY_ID) -> GGUFFile:
    """Open a GGUF that holds a model. `~` is expanded; `formats` as for `GGUFFile`.

    Raises `ModelError` if it cannot be read, is an adapter or another kind of file, or names no architecture.
    """
    file = GGUFFile(Path(path).expanduser(), formats)
    kind = file.metadata.get("general.type", "model")
    if kind == "adapter":
        raise ModelError(
            f"{file.path}: this is an adapter; give its base model here, and the adapter as lora.init_adapter"
            " or with --adapter"
        )
    if kind != "model":
        raise ModelError(f"{file.path}: general.type is {kind!r}; a language model was expected")
    if not file.architecture:
        raise ModelError(f"{file.path}: metadata general.architecture is missing; convert the model again")
    return file


def _load_parts(path: Path, formats: Mapping[int, BlockFormat]) -> list[ParsedFile]:
    opened = parse_file(path, formats)
    count = opened.metadata.get("split.count", 0)
    if not isinstance(count, int):
        raise ModelError(f"{path}: metadata split.count is {count!r}, not a number; download the model again")
    if count <= 1:
        return [opened]
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(
            f"{path}: this is one part of a model split into {count}, but it is not called"
            f" NAME-00001-of-{count:05d}.gguf; give the parts their original names, or join them with"
            " `llama-gguf-split --merge`"
        )
    prefix = match["prefix"]
    names = [path.with_name(f"{prefix}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [name.name for name in names if not name.is_file()]
    if missing:
        raise ModelError(
            f"{path}: the model is split into {count} parts and these are missing beside it:"
            f" {', '.join(missing)}; download them too"
        )
    parts = [opened if name == path else parse_file(name, formats) for name in names]
    for index, part in enumerate(parts):
        number, total = part.metadata.get("split.no"), part.metadata.get("split.count")
        if (number, total) != (index, count):
            raise ModelError(
                f"{part.path}: by its metadata it is part {number} of {total}, by its name {index} of {count}"
                " (counted from 0); give the parts their original names"
            )
    announced = parts[0].metadata.get("split.tensors.count")
    found = sum(len(part.tensors) for part in parts)
    if announced is not None and announced != found:
        raise ModelError(
            f"{path}: the parts hold {found} tensors, {announced} are announced; download all parts again"
        )
    return parts
