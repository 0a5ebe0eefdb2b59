"""Products with weights as they lie in the file: plans, scratch, and the ops of the kernel contract."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import KernelError, QuantMatrix

from ._decode import Format, decoder
from ._gemm_drivers import (
    Plan,
    convert_parallel,
    convert_serial,
    embed,
    multiply_gradient_parallel,
    multiply_parallel,
)
from ._gemm_kernels import Variant
from ._simd_features import jit_disabled

Floats = npt.NDArray[np.float32]
Step = tuple[Plan, npt.NDArray[np.int64]]
"""A plan, and the same as the array that drivers take."""

PANEL = 128
"""Columns of a task in float32 and bfloat16 alike: reuses a block of activations from the first cache."""
DECODED = 256
"""Weights of a row decoded at once: with 32 rows, 32 KiB."""
CHUNK_TOKENS = 128
"""Fewest tokens for which decoding a panel once more pays to keep all threads busy."""
SERIAL_VALUES = 1 << 15
"""Activations up to this many are converted on the calling thread: a parallel region costs more."""
GRADIENT_VALUES = 4 << 20
"""Output gradients are converted in parts of about this many values, to bound the scratch."""

KEPT_PLANS = 4096
"""Plans kept for shapes seen before; a run has few, generation one a number of sequences."""


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def _floats(count: int) -> Floats:
    """Uninitialised float32 array that begins on a cache line."""
    raw = np.empty(count + 16, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    return raw[start : start + count]


class Workspace:
    """Scratch that the products of one run share; grows to the largest and stays.

    `lock` is held during a product: two Python threads take turns.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counter = np.zeros(8, np.int64)
        self._scratch = _floats(0)
        self._activations = _floats(0)

    def scratch(self, count: int) -> Floats:
        """At least `count` float32 for decoded and packed panels."""
        if self._scratch.size < count:
            self._scratch = _floats(count)
        return self._scratch

    def activations(self, count: int) -> Floats:
        """At least `count` float32 for converted activations."""
        if self._activations.size < count:
            self._activations = _floats(count)
        return self._activations

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._scratch.nbytes + self._activations.nbytes


class WeightOps:
    """The ops that read weights of one format, on one instruction set.

    Functions are compiled (or loaded from Numba's cache) at the first call of an op.
    """

    def __init__(
        self, block_format: Format, load_variant: Callable[[], Variant], threads: int, workspace: Workspace
    ) -> None:
        self.format = block_format
        self._load_variant = load_variant
        self._threads = threads
        self._workspace = workspace
        self._variant: Variant | None = None
        self._decoder: Any = None
        self._plans: dict[tuple[str, int, int, int, bool], list[Step]] = {}

    def matmul(self, x: Floats, w: QuantMatrix, out: Floats) -> None:
        """out (T, N) = x (T, K) · Wᵀ, float32.

        Raises:
            KernelError: shapes, types or layout do not fit.
        """
        data = self.weight_bytes(w)
        tokens, (rows, columns) = x.shape[0], w.shape
        check("x", x, (tokens, columns), w)
        check("out", out, (tokens, rows), w, written=True)
        if tokens == 0:
            return
        with self._workspace.lock:
            kernels = self._kernels()
            [(plan, packed)] = self._steps("forward", tokens, w, False)
            a = self._convert(kernels, plan, x.reshape(-1), 0, columns)
            multiply_parallel(
                entry(self._decoder),
                entry(kernels.pack_rows),
                entry(kernels.multiply),
                packed,
                data,
                a,
                out.reshape(-1),
                self._workspace.scratch(plan.scratch_stride * plan.threads),
                self._workspace.counter,
            )

    def matmul_input_grad(self, dout: Floats, w: QuantMatrix, dx: Floats, accumulate: bool) -> None:
        """dx (T, K) = dout (T, N) · W, or adds to dx, float32.

        Raises:
            KernelError: shapes, types or layout do not fit.
        """
        data = self.weight_bytes(w)
        tokens, (rows, columns) = dout.shape[0], w.shape
        check("dout", dout, (tokens, rows), w)
        check("dx", dx, (tokens, columns), w, written=True)
        if tokens == 0:
            return
        with self._workspace.lock:
            kernels = self._kernels()
            for plan, packed in self._steps("gradient", tokens, w, bool(accumulate)):
                a = self._convert(kernels, plan, dout.reshape(-1), plan.first, plan.stop - plan.first)
                multiply_gradient_parallel(
                    entry(self._decoder),
                    entry(kernels.pack_columns),
                    entry(kernels.multiply),
                    packed,
                    data,
                    a,
                    dx.reshape(-1),
                    self._workspace.scratch(plan.scratch_stride * plan.threads),
                    self._workspace.counter,
                )

    def embedding(self, ids: npt.NDArray[np.int32], w: QuantMatrix, scale: float, out: Floats) -> None:
        """out (T, K) = scale · W[ids], ids int32 (T,).

        Raises:
            KernelError: an id is not a row of W, or shapes, types or layout do not fit.
        """
        data = self.weight_bytes(w)
        rows, columns = w.shape
        check("out", out, (ids.shape[0], columns), w, written=True)
        if ids.size == 0:
            return
        if ids.min() < 0 or ids.max() >= rows:
            raise KernelError(
                f"token ids range over [{ids.min()}, {ids.max()}] but {w.name!r} has {rows} rows:"
                " the tokenizer does not belong to the model"
            )
        self._kernels()
        embed(
            entry(self._decoder),
            np.ascontiguousarray(ids, dtype=np.int32),
            data,
            w.data.shape[1],
            columns // self.format.values,
            columns,
            np.float32(scale),
            out.reshape(-1),
        )

    def _kernels(self) -> Variant:
        if self._variant is None:
            self._decoder = decoder(self.format)
            self._variant = self._load_variant()
        return self._variant

    def weight_bytes(self, w: QuantMatrix) -> npt.NDArray[np.uint8]:
        """The stored bytes as a read-only flat array; `KernelError` if they do not fit the format."""
        layout = self.format
        blocks, rest = divmod(w.columns, layout.values)
        if rest or w.data.shape[1] != blocks * layout.bytes or w.data.dtype != np.uint8:
            raise KernelError(
                f"weight {w.name!r}: {w.columns} columns of {layout.name} take whole blocks of"
                f" {layout.values} values in {layout.bytes} bytes, but a row has {w.data.shape[1]} bytes of"
                f" {w.data.dtype}; the file is damaged or names the wrong format"
            )
        if not w.data.flags.c_contiguous:
            raise KernelError(f"weight {w.name!r}: rows must lie one after another; copy it first")
        flat = w.data.view(np.ndarray).reshape(-1)
        if flat.flags.writeable:
            flat = flat.view()
            flat.flags.writeable = False
        return flat

    def _convert(self, kernels: Variant, plan: Plan, x: Floats, start: int, count: int) -> Floats:
        """Activations [start, start + count) of each token, as the kernels want them."""
        a = self._workspace.activations(round_up(plan.tokens, kernels.token_block) * plan.a_stride)
        stride = x.size // plan.tokens
        sizes = (plan.tokens, count, a, plan.a_stride, kernels.token_block)
        convert = entry(kernels.convert)
        if plan.tokens * count <= SERIAL_VALUES or plan.threads == 1:
            convert_serial(convert, x, start, stride, *sizes)
        else:
            convert_parallel(convert, x, start, stride, *sizes, self._workspace.counter, plan.threads)
        return a

    def _steps(self, direction: str, tokens: int, w: QuantMatrix, accumulate: bool) -> list[Step]:
        """Plans of the calls that make up one product, kept for the next one of the same shape."""
        key = (direction, tokens, w.rows, w.columns, accumulate)
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            forward = direction == "forward"
            plans = [self._plan(tokens, w)] if forward else self._gradient_plans(tokens, w, accumulate)
            found = self._plans[key] = [(plan, plan.packed()) for plan in plans]
        return found

    def _plan(self, tokens: int, w: QuantMatrix) -> Plan:
        """Panels of weight rows; narrower or by chunks of tokens where threads would idle."""
        kernels = self._kernels()
        panel = PANEL
        while panel > kernels.width and -(-w.rows // panel) < 4 * self._threads:
            panel //= 2
        panel = max(panel, kernels.width)
        chunk = self._chunk(tokens, -(-w.rows // panel))
        depth = min(kernels.depth, round_up(w.columns, DECODED))
        return self._layout(w, tokens, panel, chunk, depth, DECODED, kernels.width * DECODED)

    def _gradient_plans(self, tokens: int, w: QuantMatrix, accumulate: bool) -> list[Plan]:
        """Panels of weight columns, in whole blocks; one plan for each part of the weight's rows."""
        kernels = self._kernels()
        step = max(kernels.width, self.format.values)
        panel = max(step, PANEL // step * step)
        while panel // 2 >= step and -(-w.columns // panel) < 4 * self._threads:
            panel //= 2
        chunk = self._chunk(tokens, -(-w.columns // panel))
        depth = min(kernels.depth, round_up(w.rows, 32))
        whole = self._layout(w, tokens, panel, chunk, depth, 32, panel * 32)
        part = max(depth, GRADIENT_VALUES // tokens // depth * depth)
        return [
            attrs.evolve(
                whole,
                first=first,
                stop=min(w.rows, first + part),
                accumulate=int(accumulate or first > 0),
                a_stride=kernels.activation_stride(min(w.rows - first, part)),
            )
            for first in range(0, w.rows, part)
        ]

    def _chunk(self, tokens: int, panels: int) -> int:
        parts = min(-(-3 * self._threads // panels), max(1, tokens // CHUNK_TOKENS))
        return round_up(-(-tokens // parts), self._kernels().token_block)

    def _layout(
        self, w: QuantMatrix, tokens: int, panel: int, chunk: int, depth: int, piece: int, decoded: int
    ) -> Plan:
        kernels = self._kernels()
        sub_stride = round_up(depth, 32) * kernels.width // kernels.weights_per_float
        spare = decoded + -(-panel // kernels.width) * sub_stride
        return Plan(
            tokens=tokens,
            rows=w.rows,
            columns=w.columns,
            row_bytes=w.data.shape[1],
            block_values=self.format.values,
            block_bytes=self.format.bytes,
            panel=panel,
            chunk=chunk,
            depth=depth,
            piece=piece,
            width=kernels.width,
            weights_per_float=kernels.weights_per_float,
            a_stride=kernels.activation_stride(w.columns),
            a_step=kernels.activation_step,
            token_block=kernels.token_block,
            sub_stride=sub_stride,
            panel_offset=decoded,
            spare_offset=spare,
            scratch_stride=round_up(spare + kernels.token_block * kernels.width, 16),
            threads=self._threads,
        )


def entry(holder: Any) -> Any:
    """What a driver calls: the address of a compiled function, or without the JIT the function."""
    return holder if jit_disabled() else holder.address


def check(
    argument: str, array: Any, shape: tuple[int, int], w: QuantMatrix, *, written: bool = False
) -> None:
    """Raise `KernelError` unless `array` is float32, C-contiguous and of `shape`."""
    if (
        array.shape != shape
        or array.dtype != np.float32
        or not array.flags.c_contiguous
        or (written and not array.flags.writeable)
    ):
        raise KernelError(
            f"weight {w.name!r} {w.shape}: {argument} must be a C-contiguous"
            f"{' writeable' if written else ''} float32 array of shape {shape}, not"
            f" {array.dtype} {array.shape}{'' if array.flags.c_contiguous else ', not contiguous'}"
        )
