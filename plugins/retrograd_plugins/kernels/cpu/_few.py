"""`matmul_few`: products for generation, with weights as they lie in the file and 8-bit activations.

Activations are rounded in blocks of 32 to int8 with a scale of their own, so a row of the result has a
relative error of about 0.5 % of its norm (1.3 % at worst, where one value of each block dwarfs the others):
what llama.cpp does. The products of a block are exact integers, and the blocks of a row are added in
float32 in their order, so a row's bits depend on that row alone, not on the variant of the instruction
set either. With F32, F16 and BF16 weights activations are not rounded: each element is one chain of
multiply-adds along the row, the same bits as `matmul` of the avx512 and avx2 variants.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from numba import cfunc, types

from retrograd_hookspecs import QuantMatrix

from . import _rows_k, _rows_legacy
from ._few_drivers import RUN, FewPlan, copy_tokens, few_parallel, few_serial, round_tokens
from ._gemm import Floats, WeightOps, Workspace, check
from ._rows_sinks import BLOCK, MADD_256, RECORD, SIGNED_BIAS, VNNI_256, VNNI_512
from ._simd_features import target_features
from ._simd_rows import ROWS

CHUNK = 64
"""Tokens for which a weight is unpacked once: unpacking costs less than a tenth of their products, and
their records stay in the second cache."""
SERIAL_BYTES = 1 << 16
"""Packed weights up to this size are multiplied on the calling thread: a parallel region costs more."""
TASKS_A_THREAD = 8
KEPT_PLANS = 4096

UNPACK_SIGNATURE = types.void(types.CPointer(types.uint8), *[types.int64] * 5)
CONVERT_SIGNATURE = types.void(*[types.int64] * 6)

VNNI_FEATURES = frozenset({"avx512f", "avx512bw", "avx512vnni"})


@attrs.frozen(kw_only=True)
class RowsFormat:
    """How a format is unpacked for 16 rows."""

    make: Callable[[int], Callable[..., None]]
    bias: int = 0
    floats: bool = False


ROWS_FORMATS: Mapping[str, RowsFormat] = MappingProxyType(
    {
        "F32": RowsFormat(make=_rows_legacy.make_f32, floats=True),
        "F16": RowsFormat(make=_rows_legacy.make_f16, floats=True),
        "BF16": RowsFormat(make=_rows_legacy.make_bf16, floats=True),
        "Q4_0": RowsFormat(make=_rows_legacy.make_q4_0, bias=8),
        "Q4_1": RowsFormat(make=_rows_legacy.make_q4_1),
        "Q5_0": RowsFormat(make=_rows_legacy.make_q5_0, bias=16),
        "Q5_1": RowsFormat(make=_rows_legacy.make_q5_1),
        "Q8_0": RowsFormat(make=_rows_legacy.make_q8_0, bias=SIGNED_BIAS),
        "Q2_K": RowsFormat(make=_rows_k.make_q2_k),
        "Q3_K": RowsFormat(make=_rows_k.make_q3_k, bias=4),
        "Q4_K": RowsFormat(make=_rows_k.make_q4_k),
        "Q5_K": RowsFormat(make=_rows_k.make_q5_k),
        "Q6_K": RowsFormat(make=_rows_k.make_q6_k, bias=32),
        "IQ4_NL": RowsFormat(make=_rows_legacy.make_iq4_nl, bias=SIGNED_BIAS),
        "IQ4_XS": RowsFormat(make=_rows_legacy.make_iq4_xs, bias=SIGNED_BIAS),
        "MXFP4": RowsFormat(make=_rows_legacy.make_mxfp4, bias=_rows_legacy.E2M1_BIAS),
    }
)


def products_kind(variant: str) -> int | None:
    """How a variant multiplies bytes on this processor; None for one that has no `matmul_few`."""
    features = target_features()
    if variant in ("amx", "avx512") and features >= VNNI_FEATURES:
        return VNNI_512
    if variant in ("amx", "avx512", "avx2") and {"avx2", "fma"} <= features:
        return VNNI_256 if "avxvnni" in features else MADD_256
    return None


class FewOps:
    """`matmul_few` for one format; compiled, or loaded from Numba's cache, at the first call."""

    def __init__(self, exact: WeightOps, kind: int, threads: int, workspace: Workspace) -> None:
        self._exact = exact
        self._format = ROWS_FORMATS[exact.format.name]
        self._kind = kind
        self._threads = threads
        self._workspace = workspace
        self._plans: dict[tuple[int, int, int], tuple[FewPlan, npt.NDArray[np.int64]]] = {}
        self._weights: weakref.WeakKeyDictionary[QuantMatrix, npt.NDArray[np.uint8]] = (
            weakref.WeakKeyDictionary()
        )
        self._convert: Any = None
        self._unpack: Any = None

    def matmul_few(self, x: Floats, w: QuantMatrix, out: Floats) -> None:
        """out (T, N) = x (T, K) · Wᵀ, float32; x rounded to 8 bits where the weight has quants.

        Float weights whose K is not a multiple of 32 are left to `matmul`.

        Raises:
            KernelError: shapes, types or layout do not fit.
        """
        rows, columns = w.shape
        if columns % BLOCK:
            self._exact.matmul(x, w, out)
            return
        data = self._weights.get(w)
        if data is None:
            data = self._prepare(w)
        tokens = x.shape[0]
        check("x", x, (tokens, columns), w)
        check("out", out, (tokens, rows), w, written=True)
        if tokens == 0 or rows == 0:
            return
        if rows < ROWS:
            padded = np.empty((tokens, ROWS), np.float32)
            self._multiply(x, data, ROWS, columns, padded)
            out[...] = padded[:, :rows]
            return
        self._multiply(x, data, rows, columns, out)

    def _multiply(self, x: Floats, data: npt.NDArray[np.uint8], rows: int, columns: int, out: Floats) -> None:
        if self._unpack is None:
            self._compile()
        plan, packed = self._plan(x.shape[0], rows, columns, data.size // rows)
        with self._workspace.lock:
            scratch = self._workspace.scratch(plan.records_at + plan.tokens * plan.record_floats)
            where = (self._convert.address, self._unpack.address, packed, data.ctypes.data, x, out, scratch)
            if plan.threads == 1:
                few_serial(*where)
            else:
                few_parallel(*where, self._workspace.counter)

    def _prepare(self, w: QuantMatrix) -> npt.NDArray[np.uint8]:
        """The stored bytes, checked once a weight; with rows of zeros up to 16."""
        data = self._exact.weight_bytes(w)
        if w.rows < ROWS:
            padded = np.zeros(ROWS * w.data.shape[1], np.uint8)
            padded[: data.size] = data
            data = padded
        self._weights[w] = data
        return data

    def _compile(self) -> None:
        convert = copy_tokens if self._format.floats else round_tokens
        self._convert = cfunc(CONVERT_SIGNATURE, cache=True)(convert)
        self._unpack = cfunc(UNPACK_SIGNATURE, cache=True)(self._format.make(self._kind))

    def _plan(
        self, tokens: int, rows: int, columns: int, row_bytes: int
    ) -> tuple[FewPlan, npt.NDArray[np.int64]]:
        found = self._plans.get((tokens, rows, columns))
        if found is not None:
            return found
        if len(self._plans) >= KEPT_PLANS:
            self._plans.clear()
        groups = -(-rows // ROWS)
        threads = 1 if rows * row_bytes <= SERIAL_BYTES else self._threads
        chunk = min(CHUNK, tokens)
        plan = FewPlan(
            tokens=tokens,
            rows=rows,
            columns=columns,
            row_bytes=row_bytes,
            blocks=columns // self._exact.format.values,
            chunk=chunk,
            record_floats=columns if self._format.floats else columns // BLOCK * RECORD // 4,
            task_groups=max(1, groups // (threads * TASKS_A_THREAD)),
            threads=threads,
            bias=self._format.bias,
            records_at=threads * chunk * ROWS * RUN,
        )
        found = self._plans[tokens, rows, columns] = (plan, plan.packed())
        return found
