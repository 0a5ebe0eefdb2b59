"""Products with weights of formats that have no decoder here: expanded to float32 once, then multiplied."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.gguf.formats import dequantise
from retrograd_hookspecs import KernelError, ModelError, QuantMatrix

from ._gemm import WeightOps
from ._gemm_workspace import Floats


class ExpandedOps:
    """The ops of `WeightOps` for any format that `gguf` or a plugin can dequantise.

    A weight is expanded at its first use and kept, which takes four bytes a value. Only read-only data
    is kept: what is writeable may be trained in place.
    """

    def __init__(self, ops: WeightOps) -> None:
        self._ops = ops
        # The stored bytes are kept too, so that their address is not used again while the entry lives.
        self._expanded: dict[tuple[str, int, int, int], tuple[npt.NDArray[np.uint8], QuantMatrix]] = {}

    def matmul(self, x: Floats, w: QuantMatrix, out: Floats) -> None:
        """out (T, N) = x (T, K) · Wᵀ, float32."""
        self._ops.matmul(x, self._expand(w), out)

    def matmul_input_grad(self, dout: Floats, w: QuantMatrix, dx: Floats, accumulate: bool) -> None:
        """dx (T, K) = dout (T, N) · W, or adds to dx, float32."""
        self._ops.matmul_input_grad(dout, self._expand(w), dx, accumulate)

    def embedding(self, ids: npt.NDArray[np.int32], w: QuantMatrix, scale: float, out: Floats) -> None:
        """out (T, K) = scale · W[ids], ids int32 (T,); expands the rows asked for and no others."""
        if ids.size == 0:
            return
        if ids.min() < 0 or ids.max() >= w.rows:
            raise KernelError(
                f"token ids range over [{ids.min()}, {ids.max()}] but {w.name!r} has {w.rows} rows:"
                " the tokenizer does not belong to the model"
            )
        rows, places = np.unique(ids, return_inverse=True)
        used = expand(attrs.evolve(w, data=w.data[rows]))
        self._ops.embedding(places.astype(np.int32), used, scale, out)

    def _expand(self, w: QuantMatrix) -> QuantMatrix:
        if w.data.flags.writeable:
            return expand(w)
        key = (w.format, w.data.ctypes.data, w.rows, w.columns)
        found = self._expanded.get(key)
        if found is None:
            found = self._expanded[key] = (w.data, expand(w))
        return found[1]


def expand(w: QuantMatrix) -> QuantMatrix:
    """The weight as a matrix of format F32.

    Raises:
        KernelError: the format cannot be dequantised, or the rows do not hold `columns` values.
    """
    try:
        values = w.decode(w.data) if w.decode is not None else dequantise(w.data, w.format)
    except ModelError as error:
        raise KernelError(f"weight {w.name!r}: {error}") from error
    if values.shape != w.shape:
        raise KernelError(
            f"weight {w.name!r}: {w.data.shape[1]} bytes a row hold {values.shape[1]} values of {w.format},"
            f" not {w.columns}; the file is damaged"
        )
    return QuantMatrix(name=w.name, format="F32", data=values.view(np.uint8), columns=w.columns)
