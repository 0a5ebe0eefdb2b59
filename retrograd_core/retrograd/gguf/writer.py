"""Writing GGUF files: typed metadata, tensors streamed one at a time, the file complete or absent.

`gguf.GGUFWriter` is not used: it refuses empty arrays, has no way to copy a key-value pair byte for byte,
and reports a full disk as a short write without the cause.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import attrs
import numpy as np
import numpy.typing as npt
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_VERSION, GGUFValueType

from retrograd_hookspecs import ModelError

from .formats import block_format

_SCALARS: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
_BY_DTYPE: Mapping[np.dtype[Any], GGUFValueType] = {
    np.dtype(np.uint8): GGUFValueType.UINT8,
    np.dtype(np.int8): GGUFValueType.INT8,
    np.dtype(np.uint16): GGUFValueType.UINT16,
    np.dtype(np.int16): GGUFValueType.INT16,
    np.dtype(np.uint32): GGUFValueType.UINT32,
    np.dtype(np.int32): GGUFValueType.INT32,
    np.dtype(np.float32): GGUFValueType.FLOAT32,
    np.dtype(np.uint64): GGUFValueType.UINT64,
    np.dtype(np.int64): GGUFValueType.INT64,
    np.dtype(np.float64): GGUFValueType.FLOAT64,
    np.dtype(np.bool_): GGUFValueType.BOOL,
}


@attrs.frozen
class RawValue:
    """A metadata value as it stands in another GGUF: its type tag and payload, little-endian."""

    data: bytes


MetadataValue = Any
"""bool, int (UINT32, or INT32 when negative), float (FLOAT32), str, bytes (a string that is not UTF-8), a
sequence of one of these, a NumPy scalar or 1-D array (its dtype's type), or `RawValue`."""


@attrs.frozen(kw_only=True)
class TensorPlan:
    """A tensor to be written: name, row-major shape and ggml type name."""

    name: str
    shape: tuple[int, ...]
    format: str

    @property
    def bytes(self) -> int:
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return rows * block_format(self.format).row_bytes(self.shape[-1])


class GGUFOutput:
    """A GGUF being written: metadata and tensor table at once, then the tensors in the planned order.

    Used as a context manager it is atomic: bytes go to a temporary file in the same directory, which
    takes the final name, flushed to the disk, when the block ends without an exception and is removed
    otherwise. Whatever had the name before stays until then.

    Raises `ModelError` if the disk is full or the directory cannot be written.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, MetadataValue],
        tensors: Sequence[TensorPlan],
        *,
        alignment: int = GGUF_DEFAULT_ALIGNMENT,
    ) -> None:
        self.path = path
        self._alignment = alignment
        self._plans = tuple(tensors)
        names = [plan.name for plan in self._plans]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ModelError(f"{path}: tensor {twice[0]} would be written twice")
        self._header = _header(metadata, self._plans, alignment)
        self._next = 0
        self._stack = contextlib.ExitStack()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> GGUFOutput:
        needed = len(self._header) + sum(plan.bytes + self._alignment for plan in self._plans)
        _require_space(self.path, needed)
        self._file = self._stack.enter_context(atomic_file(self.path))
        try:
            self._write(self._header)
            self._pad()
        except BaseException as error:
            # `__exit__` is not called when `__enter__` raises; the temporary file has to go here.
            if not self._stack.__exit__(type(error), error, error.__traceback__):
                raise
        return self

    def write(self, rows: npt.NDArray[Any]) -> None:
        """Append all bytes of the next planned tensor; rows are packed uint8 or of the plain dtype."""
        self.write_parts((rows,))

    def write_parts(self, parts: Iterable[npt.NDArray[Any]]) -> None:
        """Append the next planned tensor in parts, so that a large one never is in memory whole."""
        plan = self._plans[self._next]
        written = 0
        for part in parts:
            chunk = np.ascontiguousarray(part)
            self._write(chunk.reshape(-1).view(np.uint8).data)
            written += chunk.nbytes
        if written != plan.bytes:
            raise ModelError(
                f"{self.path}: tensor {plan.name} {plan.shape} in {plan.format} takes {plan.bytes} bytes,"
                f" but {written} were given"
            )
        self._pad()
        self._next += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is None and self._next != len(self._plans):
            error = ModelError(
                f"{self.path}: {len(self._plans) - self._next} planned tensors were not written, first"
                f" {self._plans[self._next].name}"
            )
            self._stack.__exit__(type(error), error, None)
            raise error
        return self._stack.__exit__(kind, error, trace)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        self._file.write(data)

    def _pad(self) -> None:
        assert self._file is not None
        self._write(bytes(-self._file.tell() % self._alignment))


def write_gguf(
    path: Path,
    metadata: Mapping[str, MetadataValue],
    tensors: Iterable[tuple[TensorPlan, npt.NDArray[Any]]],
    *,
    alignment: int = GGUF_DEFAULT_ALIGNMENT,
) -> None:
    """Write a small GGUF whose tensors are in memory, atomically; see `GGUFOutput`."""
    pairs = list(tensors)
    with GGUFOutput(path, metadata, [plan for plan, _ in pairs], alignment=alignment) as output:
        for _, rows in pairs:
            output.write(rows)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the name `path` when the block ends well, and leaves no trace otherwise.

    The data and the directory entry are on the disk when the block has ended. Raises `ModelError` with the
    cause and the mend where the operating system refuses (disk full, no permission, quota).
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile: only the owner may read what it creates, also after the rename.
        candidate = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        with candidate.open("xb") as file:
            temporary = candidate
            yield file
            file.flush()
            os.fsync(file.fileno())
        candidate.replace(path)
        temporary = None
        sync_directory(path.parent)
    except OSError as error:
        raise ModelError(_explain(path, error)) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _require_space(path: Path, needed: int) -> None:
    # Told before the work rather than after it; another process may still fill the disk meanwhile.
    existing = next((parent for parent in path.absolute().parents if parent.is_dir()), None)
    free = shutil.disk_usage(existing).free if existing else needed
    if free < needed:
        raise ModelError(
            f"{path}: the file takes {needed / 1e6:.1f} MB, but only {free / 1e6:.1f} MB are free there;"
            " free some space or write to another disk"
        )


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a directory; the file itself is safe there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _explain(path: Path, error: OSError) -> str:
    kept = "the file that had this name before, if any, is unchanged"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path}: no space left on the disk while writing ({error.strerror}); {kept}."
            " Free some space or write to another disk"
        )
    return f"{path}: cannot write: {error.strerror or error}; {kept}"


def _header(metadata: Mapping[str, MetadataValue], plans: Sequence[TensorPlan], alignment: int) -> bytes:
    if alignment < 8 or alignment & (alignment - 1):
        raise ModelError(f"alignment {alignment} is not a power of two of at least 8")
    pairs = dict(metadata)
    if alignment != GGUF_DEFAULT_ALIGNMENT:
        pairs["general.alignment"] = np.uint32(alignment)
    else:
        pairs.pop("general.alignment", None)
    out = bytearray(struct.pack("<4sIQQ", b"GGUF", GGUF_VERSION, len(plans), len(pairs)))
    for key, value in pairs.items():
        out += _string(key)
        out += encode_value(key, value)
    offset = 0
    for plan in plans:
        out += _string(plan.name)
        out += struct.pack(f"<I{len(plan.shape)}Q", len(plan.shape), *reversed(plan.shape))
        out += struct.pack("<IQ", block_format(plan.format).type_id, offset)
        offset += plan.bytes + -plan.bytes % alignment
    return bytes(out)


def encode_value(key: str, value: MetadataValue) -> bytes:
    """Type tag and payload of a metadata value; `ModelError` names `key` if it has no GGUF type."""
    if isinstance(value, RawValue):
        return value.data
    if isinstance(value, np.ndarray):
        return _encode_array(key, value)
    kind = _scalar_type(key, value)
    if kind is not None:
        return struct.pack("<I", kind) + _payload(kind, value)
    if isinstance(value, Sequence):
        items = list(value)
        item_kinds = {_scalar_type(key, item) for item in items} or {GGUFValueType.STRING}
        if item_kinds == {GGUFValueType.UINT32, GGUFValueType.INT32}:
            item_kinds = {GGUFValueType.INT32}
        item_kind = item_kinds.pop()
        if item_kinds or item_kind is None:
            raise ModelError(
                f"metadata {key}: a GGUF array holds values of one plain type, got {items[:4]!r}…"
            )
        head = struct.pack("<IIQ", GGUFValueType.ARRAY, item_kind, len(items))
        return head + b"".join(_payload(item_kind, item) for item in items)
    raise ModelError(f"metadata {key}: a GGUF cannot hold a {type(value).__name__} ({value!r})")


def _encode_array(key: str, value: npt.NDArray[Any]) -> bytes:
    kind = _BY_DTYPE.get(value.dtype)
    if kind is None or value.ndim != 1:
        raise ModelError(f"metadata {key}: a GGUF cannot hold an array of {value.dtype} {value.shape}")
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return struct.pack("<IIQ", GGUFValueType.ARRAY, kind, value.size) + little.tobytes()


def _scalar_type(key: str, value: MetadataValue) -> GGUFValueType | None:
    if isinstance(value, np.generic):
        return _BY_DTYPE.get(value.dtype)
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        kind = GGUFValueType.INT32 if value < 0 else GGUFValueType.UINT32
        if not -(2**31) <= value < 2**32:
            raise ModelError(
                f"metadata {key}: {value} does not fit 32 bits; give a numpy.int64 or numpy.uint64"
            )
        return kind
    if isinstance(value, float):
        return GGUFValueType.FLOAT32
    if isinstance(value, str | bytes):
        return GGUFValueType.STRING
    return None


def _payload(kind: GGUFValueType, value: MetadataValue) -> bytes:
    if kind == GGUFValueType.STRING:
        return _string(value)
    return struct.pack(f"<{_SCALARS[kind]}", value)


def _string(text: str | bytes) -> bytes:
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data
