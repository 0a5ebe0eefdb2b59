"""Products that unpack sixteen rows of a weight at a time: plans, scratch, and what is compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cfunc, types

from ._decode import Format
from ._gemm_workspace import Floats, Workspace, round_up
from ._rows import ROWS_FORMATS, compiled_rows
from ._rows_activations import copy_tokens, round_tokens, tile_tokens
from ._rows_drivers import (
    RUN,
    SPARE_FLOATS,
    RowsPlan,
    rows_parallel,
    rows_serial,
    sum_group,
    tile_group,
)
from ._rows_kinds import BLOCK, MOST_TILES, MULTIPLIED, RECORD
from ._simd_rows import ROWS

CHUNK = ROWS * MOST_TILES
"""Tokens for which a weight is unpacked once: unpacking costs little beside so many products, and their
records stay in the second cache."""
SERIAL_WORK = 2 << 20
"""Weights, times tokens plus UNPACKING, up to which a product is left to the calling thread: waking the
others costs more."""
UNPACKING, UNPACKING_TILES = 8, 24
"""Tokens whose products cost what it costs to unpack a weight, to bytes and to bfloat16 tiles."""
TASKS_A_THREAD = 8
KEPT_PLANS = 4096

CONVERT_SIGNATURE = types.void(*[types.int64] * 6)
GROUP_SIGNATURE = types.void(*[types.int64] * 8)


class RowsProduct:
    """Products with weights of one format, of one kind (see `_rows_sinks`).

    Compiled, or loaded from Numba's cache, at the first product.
    """

    def __init__(self, block_format: Format, kind: int, threads: int, workspace: Workspace) -> None:
        self.format = block_format
        self._rows = ROWS_FORMATS[block_format.name]
        self._kind = kind
        self._threads = threads
        self._workspace = workspace
        self._plans: dict[tuple[int, int, int], tuple[RowsPlan, npt.NDArray[np.int64]]] = {}
        self._compiled: tuple[Any, Any, Any] | None = None

    def multiply(self, x: Floats, data: npt.NDArray[np.uint8], rows: int, columns: int, out: Floats) -> None:
        """out (T, N) = x (T, K) · Wᵀ for checked arguments; `data` are W's bytes, K a multiple of 32."""
        if rows < ROWS:
            padded = np.zeros(data.size // rows * ROWS, np.uint8)
            padded[: data.size] = data
            wide = np.empty((x.shape[0], ROWS), np.float32)
            self.multiply(x, padded, ROWS, columns, wide)
            out[...] = wide[:, :rows]
            return
        convert, group, unpack = self._compiled or self._compile()
        key = (x.shape[0], rows, columns)
        plan, packed = self._plans.get(key) or self._plan(*key)
        functions = (convert.address, group.address, unpack.address)
        with self._workspace.lock:
            spread = round_up(plan.tokens, ROWS) * plan.record_floats
            scratch = self._workspace.scratch(plan.records_at + spread)
            if plan.threads == 1:
                rows_serial(*functions, packed, data.ctypes.data, x, out, scratch)
            else:
                rows_parallel(*functions, packed, data.ctypes.data, x, out, scratch, self._workspace.counter)

    def _compile(self) -> tuple[Any, Any, Any]:
        if self._kind in MULTIPLIED:
            convert, group = tile_tokens, tile_group
        else:
            convert, group = copy_tokens if self._rows.floats else round_tokens, sum_group
        self._compiled = (
            cfunc(CONVERT_SIGNATURE, cache=True)(convert),
            cfunc(GROUP_SIGNATURE, cache=True)(group),
            compiled_rows(self.format.name, self._kind),
        )
        return self._compiled

    def _record_floats(self, columns: int) -> int:
        return columns if self._kind in MULTIPLIED or self._rows.floats else columns // BLOCK * RECORD // 4

    def _plan(self, tokens: int, rows: int, columns: int) -> tuple[RowsPlan, npt.NDArray[np.int64]]:
        if len(self._plans) >= KEPT_PLANS:
            self._plans.clear()
        groups = -(-rows // ROWS)
        unpacking = UNPACKING_TILES if self._kind in MULTIPLIED else UNPACKING
        threads = 1 if rows * columns * (tokens + unpacking) <= SERIAL_WORK else self._threads
        chunk = min(CHUNK, tokens)
        lanes = round_up(chunk, ROWS) if self._kind in MULTIPLIED else chunk
        thread_floats = SPARE_FLOATS + RUN * ROWS * lanes
        blocks = columns // self.format.values
        plan = RowsPlan(
            tokens=tokens,
            rows=rows,
            columns=columns,
            row_bytes=blocks * self.format.bytes,
            blocks=blocks,
            chunk=chunk,
            record_floats=self._record_floats(columns),
            task_groups=max(1, groups // (threads * TASKS_A_THREAD)),
            threads=threads,
            bias=self._rows.bias,
            lanes=lanes,
            thread_floats=thread_floats,
            records_at=threads * thread_floats,
        )
        found = self._plans[tokens, rows, columns] = (plan, plan.packed())
        return found
