"""`matmul_few`: products for generation, with weights as they lie in the file and 8-bit activations.

Activations are rounded in blocks of 32 to int8 with a scale of their own, so a row of the result has a
relative error of about 0.5 % of its norm (1.3 % at worst, where one value of each block dwarfs the others):
what llama.cpp does. The products of a block are exact integers, and the blocks of a row are added in
float32 in their order, so a row's bits depend on that row alone, not on the variant of the instruction
set either. With F32, F16 and BF16 weights activations are not rounded: each element is one chain of
multiply-adds along the row, the same bits as `matmul` of the avx512 and avx2 variants.
"""

from __future__ import annotations

from retrograd_hookspecs import QuantMatrix

from ._gemm import WeightOps
from ._gemm_workspace import Floats, Workspace, check
from ._rows_kinds import BLOCK, MADD_256, VNNI_256, VNNI_512
from ._rows_product import RowsProduct
from ._simd_features import TILE_VARIANTS, target_features

VNNI_FEATURES = frozenset({"avx512f", "avx512bw", "avx512vnni"})


def products_kind(variant: str) -> int | None:
    """How a variant multiplies bytes on this processor; None for one that has no `matmul_few`."""
    features = target_features()
    if variant in (*TILE_VARIANTS, "avx512") and features >= VNNI_FEATURES:
        return VNNI_512
    if variant in (*TILE_VARIANTS, "avx512", "avx2") and {"avx2", "fma"} <= features:
        return VNNI_256 if "avxvnni" in features else MADD_256
    return None


class FewOps:
    """`matmul_few` for one format; compiled, or loaded from Numba's cache, at the first call."""

    def __init__(self, exact: WeightOps, kind: int, threads: int, workspace: Workspace) -> None:
        self._exact = exact
        self._product = RowsProduct(exact.format, kind, threads, workspace)

    def matmul_few(self, x: Floats, w: QuantMatrix, out: Floats) -> None:
        """out (T, N) = x (T, K) · Wᵀ, float32; x rounded to 8 bits where the weight has quants.

        Float weights whose K is not a multiple of 32 are left to `matmul`.

        Raises:
            KernelError: shapes, types or layout do not fit.
        """
        tokens, (rows, columns) = x.shape[0], w.shape
        if columns % BLOCK:
            self._exact.matmul(x, w, out)
            return
        data = self._exact.weight_bytes(w)
        check("x", x, (tokens, columns), w)
        check("out", out, (tokens, rows), w, written=True)
        if tokens and rows:
            self._product.multiply(x, data, rows, columns, out)
