"""Products of many rows with one matrix, each row's result independent of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ROW_BLOCK = 32

Array = npt.NDArray[Any]


def product_by_rows(x: Array, matrix: Array) -> Array:
    """`x @ matrix` for x (T, K) and matrix (K, N), computed in blocks of `ROW_BLOCK` rows padded with zeros.

    BLAS picks its routine, and with it the order of summation, by the shape of the product. With every
    product of one shape, a row gets the same bits whatever rows are computed beside it.
    """
    rows, inner = x.shape
    blocks = -(-rows // ROW_BLOCK)
    padded = np.zeros((blocks * ROW_BLOCK, inner))
    padded[:rows] = x
    product = padded.reshape(blocks, ROW_BLOCK, inner) @ matrix
    return product.reshape(blocks * ROW_BLOCK, matrix.shape[1])[:rows]
