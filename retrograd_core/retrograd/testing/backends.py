"""Contract of a backend: `check_backend(backend)` raises `AssertionError` where it is broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import Backend, QuantMatrix

_DTYPES = (np.float32, np.float16, np.int32, np.int64, np.uint8, np.bool_)


def check_backend(backend: Backend, name: str = "") -> None:
    """Check what every backend promises. `name` is the component's, which selects its kernels.

    It says what it found; arrays come back as they were, whatever their shape, type or strides; `empty` has
    what was asked for and is written to in place; a weight keeps its format, width and bytes.
    """
    assert backend.name == (name or backend.name), f"the backend calls itself {backend.name!r}, not {name!r}"
    device = backend.device
    assert device.backend == backend.name, f"device.backend is {device.backend!r}, not {backend.name!r}"
    assert device.description.strip(), "device.description is empty"
    assert device.threads >= 1, f"device.threads is {device.threads}"
    assert device.memory_bytes > 0, f"device.memory_bytes is {device.memory_bytes}"
    compute = np.dtype(backend.compute_dtype)
    assert compute.kind == "f", f"compute_dtype {compute} is no floating-point type"
    rng = np.random.default_rng(0)
    for dtype in (*_DTYPES, compute):
        for shape in ((7,), (0, 3), (3, 5), (2, 3, 4)):
            values = np.asarray(rng.integers(0, 100, shape)).astype(dtype)
            _check_round_trip(backend, values, f"{np.dtype(dtype)} {shape}")
            empty = backend.to_host(backend.empty(shape, dtype))
            assert empty.shape == shape, f"empty({shape}) has the shape {empty.shape}"
            assert empty.dtype == np.dtype(dtype), f"empty(…, {np.dtype(dtype)}) has the type {empty.dtype}"
    grid = np.arange(60, dtype=np.float32).reshape(6, 10)
    for view, what in ((grid.T, "transposed"), (grid[::2, ::-3], "strided"), (grid[1:, 2:5], "sliced")):
        _check_round_trip(backend, view, what)
    first, second = backend.empty((4, 4), compute), backend.empty((4, 4), compute)
    first[...] = 1.0
    second[...] = 2.0
    assert (backend.to_host(first) == 1.0).all(), "two arrays of empty() share their memory"
    _check_upload(backend)


def _check_round_trip(backend: Backend, values: npt.NDArray[Any], what: str) -> None:
    kept = values.copy()
    found = backend.to_host(backend.from_host(values))
    assert found.dtype == values.dtype, f"{what}: {values.dtype} came back as {found.dtype}"
    assert found.shape == values.shape, f"{what}: {values.shape} came back as {found.shape}"
    assert np.array_equal(found, kept), f"{what}: other values came back"
    assert np.array_equal(values, kept), f"{what}: from_host changed its argument"


def _check_upload(backend: Backend) -> None:
    data = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    data.flags.writeable = False  # as the memory map of a model
    matrix = QuantMatrix(name="w", format="Q8_0", data=data, columns=32)
    stored = backend.upload(matrix)
    assert (stored.name, stored.format) == ("w", "Q8_0"), f"upload: now {stored.name!r} in {stored.format}"
    assert stored.shape == (2, 32), f"upload: a matrix of (2, 32) is now {stored.shape}"
    assert np.array_equal(backend.to_host(stored.data), data), "upload: other bytes are stored"
    row = stored.row_slice(1, 2)
    assert np.array_equal(backend.to_host(row.data), data[1:2]), "upload: a row cannot be taken out"
