"""Products with weights as they lie in the file: plans, scratch, and the ops of the kernel contract."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import KernelError, QuantMatrix

from ._decode import Format, decoder
from ._gemm_blocks import task_blocks, widest_panel
from ._gemm_drivers import (
    Plan,
    convert_parallel,
    convert_serial,
    embed,
    multiply_gradient_parallel,
    multiply_parallel,
)
from ._gemm_kernels import Product, Variant
from ._gemm_workspace import Floats, Workspace, check, round_up
from ._rows import compiled_rows
from ._rows_kinds import AMX, AMX_HIGH, BLOCK, TILES
from ._rows_product import RowsProduct
from ._simd_features import jit_disabled

Step = tuple[Plan, npt.NDArray[np.int64]]
"""A plan, and the same as the array that drivers take."""

DECODED = 256
"""Weights of a row decoded at once: with 32 rows, 32 KiB."""
SERIAL_VALUES = 1 << 15
"""Activations up to this many are converted on the calling thread: a parallel region costs more."""
PRODUCT_TOKENS = 64
"""Up to this many tokens AMX multiplies tiles of weights as they are unpacked, with sums in registers."""
GRADIENT_VALUES = 4 << 20
"""Output gradients are converted in parts of about this many values, to bound the scratch."""

KEPT_PLANS = 4096
"""Plans kept for shapes seen before; a run has few, generation one a number of sequences."""


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
        self._unpack: Any = None
        self._product: RowsProduct | None = None
        self._plans: dict[tuple[str, int, int, int, bool], list[Step]] = {}
        self._bytes: weakref.WeakKeyDictionary[QuantMatrix, npt.NDArray[np.uint8]] = (
            weakref.WeakKeyDictionary()
        )

    def matmul(self, x: Floats, w: QuantMatrix, out: Floats) -> None:
        """out (T, N) = x (T, K) · Wᵀ, float32.

        Raises:
            KernelError: shapes, types or layout do not fit.
        """
        data = self.weight_bytes(w)
        tokens, (rows, columns) = x.shape[0], w.shape
        check("x", x, (tokens, columns), w)
        check("out", out, (tokens, rows), w, written=True)
        if tokens == 0 or rows == 0:
            return
        kernels = self._kernels()
        if self._product is not None and tokens <= PRODUCT_TOKENS and columns % BLOCK == 0:
            self._product.multiply(x, data, rows, columns, out)
            return
        with self._workspace.lock:
            [(plan, packed)] = self._steps("forward", tokens, w, False)
            a = self._convert(kernels.forward, plan, x.reshape(-1), 0, columns)
            multiply_parallel(
                entry(self._unpack) if plan.unpacked else entry(self._decoder),
                entry(self._decoder),
                entry(kernels.forward.pack),
                entry(kernels.forward.multiply),
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
                a = self._convert(
                    kernels.gradient, plan, dout.reshape(-1), plan.first, plan.stop - plan.first
                )
                multiply_gradient_parallel(
                    entry(self._decoder),
                    entry(kernels.gradient.pack),
                    entry(kernels.gradient.multiply),
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

    def entries(self) -> tuple[int, int]:
        """Addresses of what unpacks 16 rows as right operands, 0 if nothing does, and of the decoder."""
        self._kernels()
        return entry(self._unpack) if self._unpack is not None else 0, entry(self._decoder)

    def _kernels(self) -> Variant:
        if self._variant is None:
            self._decoder = decoder(self.format)
            self._variant = self._load_variant()
            if self._variant.tiles:
                self._unpack = compiled_rows(self.format.name, TILES)
                kind = AMX_HIGH if self._variant.rounded else AMX
                self._product = RowsProduct(self.format, kind, self._threads, self._workspace)
        return self._variant

    def weight_bytes(self, w: QuantMatrix) -> npt.NDArray[np.uint8]:
        """The stored bytes as a read-only flat array; `KernelError` if they do not fit the format."""
        known = self._bytes.get(w)
        if known is not None:
            return known
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
        self._bytes[w] = flat
        return flat

    def _convert(self, product: Product, plan: Plan, x: Floats, start: int, count: int) -> Floats:
        """Activations [start, start + count) of each token, as the kernels want them."""
        a = self._workspace.activations(round_up(plan.tokens, plan.token_block) * plan.a_stride)
        stride = x.size // plan.tokens
        sizes = (plan.tokens, count, a, plan.a_stride, plan.token_block)
        convert = entry(product.convert)
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
        product = kernels.forward
        panel, chunk = task_blocks(
            (w.rows,),
            tokens,
            step=kernels.width,
            widest=widest_panel(product, w.columns, kernels.width, kernels.width),
            token_block=kernels.token_block,
            threads=self._threads,
            decoding=product.decoding,
        )
        depth = min(kernels.forward.depth, round_up(w.columns, DECODED))
        layout = self._layout(
            kernels.forward, w, tokens, panel, chunk, depth, DECODED, kernels.width * DECODED
        )
        unpacked = self._unpack is not None and w.columns % BLOCK == 0
        return attrs.evolve(layout, unpacked=int(unpacked))

    def _gradient_plans(self, tokens: int, w: QuantMatrix, accumulate: bool) -> list[Plan]:
        """Panels of weight columns, in whole blocks; one plan for each part of the weight's rows."""
        kernels = self._kernels()
        step = max(kernels.width, self.format.values)
        product = kernels.gradient
        panel, chunk = task_blocks(
            (w.columns,),
            tokens,
            step=step,
            widest=widest_panel(product, w.rows, step, kernels.width),
            token_block=kernels.token_block,
            threads=self._threads,
            decoding=product.decoding,
        )
        depth = min(kernels.gradient.depth, round_up(w.rows, 32))
        whole = self._layout(kernels.gradient, w, tokens, panel, chunk, depth, 32, panel * 32)
        part = max(depth, GRADIENT_VALUES // tokens // depth * depth)
        return [
            attrs.evolve(
                whole,
                first=first,
                stop=min(w.rows, first + part),
                accumulate=int(accumulate or first > 0),
                a_stride=kernels.gradient.activation_stride(min(w.rows - first, part)),
            )
            for first in range(0, w.rows, part)
        ]

    def _layout(
        self,
        product: Product,
        w: QuantMatrix,
        tokens: int,
        panel: int,
        chunk: int,
        depth: int,
        piece: int,
        decoded: int,
    ) -> Plan:
        kernels = self._kernels()
        sub_stride = round_up(depth, 32) * kernels.width // product.weights_per_float
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
            weights_per_float=product.weights_per_float,
            a_stride=product.activation_stride(w.columns),
            a_step=product.activation_step,
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
