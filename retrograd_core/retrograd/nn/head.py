"""Output head: log-probabilities and their gradient, without the full logits ever existing."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import ABSENT, KernelTable, QuantMatrix

from .norm import RMSNorm
from .workspace import Scope

TILE_MULTIPLE = 64
"""Tiles begin at multiples of this many vocabulary entries, so that kernels see whole panels."""


@attrs.frozen(kw_only=True)
class HeadPlan:
    """How the work is cut: into `tiles` of the vocabulary and chunks of `rows` tokens (0: all)."""

    tiles: int = 8
    rows: int = 512


class Head:
    """logits = norm(x)·Wᵀ, soft-capped if the model asks for it. Never trained."""

    def __init__(
        self, *, weight: QuantMatrix, norm: RMSNorm, softcap: float, kernels: KernelTable, scratch: Scope
    ) -> None:
        self.weight = weight
        self.norm = norm
        self._softcap = softcap
        self._scratch = scratch
        self._backend = scratch.workspace.backend
        self._matmul = kernels.get("matmul", weight.format)
        self._few = kernels.get("matmul_few", weight.format)
        self.few_rows = False
        """`logits` through `matmul_few`; see `CausalLM.few_rows`."""
        self._input_grad = kernels.get("matmul_input_grad", weight.format)
        self._fold = kernels.get("logsumexp_tile")
        self._softmax_grad = kernels.get("softmax_grad_tile")
        self._embedding = kernels.get("embedding", weight.format)
        # Capped logits do not tell their slope. And the rounding errors of the sum are alike from token to
        # token, # which float32 products show in the gradients (three times the error) and bfloat16 ones do
        # not.
        self._carries_sum = softcap == 0.0 and kernels.serving("narrow").variant != ABSENT
        """Whether the gradient's sum over the vocabulary goes along with the softmax's."""

    def normed(self, x: Any) -> Any:
        """Final hidden states (n, E): the normalised residual stream x."""
        out = self._scratch.rows("head.normed", *x.shape)
        self.norm.forward(x, out, self._scratch.rows("head.rstd", x.shape[0]))
        return out

    def logits(self, x: Any, out: Any, plan: HeadPlan | None = None) -> None:
        """x (n, E) of the residual stream to out (n, V), capped. With a `plan` by its tiles, so that the
        bits are those of `log_probabilities` with any kernel."""
        multiply = self._few if self.few_rows else self._matmul
        normed = self.normed(x)
        if plan is None:
            multiply(normed, self.weight, out)
        else:
            for start, weight in self._tiles(plan):
                tile = self._tile(x.shape[0], weight, plan)
                multiply(normed, weight, tile)
                out[:, start : start + weight.rows] = tile
        if self._softcap > 0.0:
            # The kernel caps in place on its way; what else it computes is not needed here.
            targets = self._backend.from_host(np.zeros(x.shape[0], dtype=np.int32))
            self._fold(out, 0, targets, self._softcap, *self._running(x.shape[0]))

    def log_probabilities_of(
        self, logits: Any, targets: Any, plan: HeadPlan
    ) -> npt.NDArray[np.floating[Any]]:
        """log p(target) (n,) on the host from whole logits (n, V) as `logits` gives them, targets int32 (n,).

        Folded tile by tile as in `log_probabilities`, so that the bits are the same.
        """
        highest, total, target_logit = self._running(logits.shape[0])
        for start, stop in vocabulary_tiles(self.weight.rows, plan.tiles):
            tile = self._tile(logits.shape[0], self.weight.row_slice(start, stop), plan)
            tile[...] = logits[:, start:stop]
            self._fold(tile, start, targets, 0.0, highest, total, target_logit)
        to_host = self._backend.to_host
        logsumexp = to_host(highest) + np.log(to_host(total))
        return np.asarray(to_host(target_logit) - logsumexp)

    def log_probabilities(
        self, x: Any, targets: Any, plan: HeadPlan, *, gradients: bool = False
    ) -> tuple[npt.NDArray[np.floating[Any]], Any]:
        """x (n, E), targets int32 (n,) to log p(target) on the host and logsumexp on the device, (n,).

        `gradients` prepares `backward`: with each tile the sum Σ softmax · W over all but the target goes
        along, scaled by the running maximum as the sum of the softmax itself, so that no logit is computed a
        second time.
        """
        normed = self.normed(x)
        highest, total, target_logit = self._running(x.shape[0])
        expected = self._expected(x) if gradients and self._carries_sum else None
        tiles = self._tiles(plan)
        for first, stop in _chunks(x.shape[0], plan.rows):
            rows = slice(first, stop)
            for start, weight in tiles:
                logits = self._tile(stop - first, weight, plan)
                self._matmul(normed[rows], weight, logits)
                before = self._backend.to_host(highest[rows]).copy()
                self._fold(
                    logits,
                    start,
                    targets[rows],
                    self._softcap,
                    highest[rows],
                    total[rows],
                    target_logit[rows],
                )
                if expected is not None:
                    self._add_expected(
                        logits, weight, before, highest[rows], expected[rows], targets[rows], start
                    )
        to_host = self._backend.to_host
        logsumexp = to_host(highest) + np.log(to_host(total))
        return to_host(target_logit) - logsumexp, self._backend.from_host(logsumexp)

    def backward(self, x: Any, targets: Any, logsumexp: Any, dlogp: Any, dx: Any, plan: HeadPlan) -> None:
        """Gradient by x of Σ dlogp · log p(target), right after `log_probabilities` of the same rows with
        `gradients`.

        x, dx (n, E); `targets`, `logsumexp`, `dlogp` (n,).
        """
        if not self._carries_sum:
            dnormed = self._recomputed_gradient(x, targets, logsumexp, dlogp, plan)
        else:
            # d log p / d normed = (1 − p) · W[target] − Σ softmax · W over the others. With the target in the
            # sum, the rounding of its weights would outweigh the gradient of a token that is nearly certain.
            dnormed = self._expected(x)
            dnormed /= self._scratch.rows("head.sum", x.shape[0])[:, None]
            chosen = self._scratch.rows("head.chosen", *x.shape)
            self._embedding(targets, self.weight, 1.0, chosen)
            rest = -np.expm1(self._scratch.rows("head.target", x.shape[0]) - logsumexp)
            chosen *= rest[:, None]
            np.subtract(chosen, dnormed, out=dnormed)
            dnormed *= dlogp[:, None]
        self.norm.backward(dnormed, x, self._scratch.rows("head.rstd", x.shape[0]), dx)

    def _expected(self, x: Any) -> Any:
        return self._scratch.rows("head.dnormed", *x.shape)

    def _add_expected(
        self,
        logits: Any,
        weight: QuantMatrix,
        before: Any,
        highest: Any,
        expected: Any,
        targets: Any,
        start: int,
    ) -> None:
        """expected (n, E) = or += exp(logits − highest) · W without the targets, what was there first scaled
        to the new maximum. The tile begins at vocabulary entry `start`.

        Source: Milakov & Gimelshein 2018, algorithm 3, for a weighted sum.
        """
        rows = logits.shape[0]
        if start:
            factor = np.exp(before - self._backend.to_host(highest))
            expected *= self._backend.from_host(factor)[:, None]
        nowhere = self._backend.from_host(np.full(rows, -1, np.int32))
        minus_one = self._backend.from_host(np.full(rows, -1.0, expected.dtype))
        self._softmax_grad(logits, 0, nowhere, 0.0, highest, minus_one)
        place = self._backend.to_host(targets) - start
        here = np.flatnonzero((place >= 0) & (place < logits.shape[1]))
        logits[here, place[here]] = 0
        self._input_grad(logits, weight, expected, start > 0)

    def _recomputed_gradient(self, x: Any, targets: Any, logsumexp: Any, dlogp: Any, plan: HeadPlan) -> Any:
        """Gradient by the normalised x, (n, E); the logits are computed once more."""
        count, width = x.shape
        normed = self._scratch.rows("head.normed", count, width)
        dnormed = self._expected(x)
        for first, stop in _chunks(count, plan.rows):
            rows = slice(first, stop)
            for start, weight in self._tiles(plan):
                logits = self._tile(stop - first, weight, plan)
                self._matmul(normed[rows], weight, logits)
                self._softmax_grad(logits, start, targets[rows], self._softcap, logsumexp[rows], dlogp[rows])
                self._input_grad(logits, weight, dnormed[rows], start > 0)
        return dnormed

    def _running(self, count: int) -> tuple[Any, Any, Any]:
        """Running maximum, sum and target logit (count,), as `logsumexp_tile` wants them at the start."""
        highest, total, target = (
            self._scratch.rows(f"head.{name}", count) for name in ("max", "sum", "target")
        )
        highest[...] = -np.inf
        total[...] = 0
        return highest, total, target

    def _tile(self, rows: int, weight: QuantMatrix, plan: HeadPlan) -> Any:
        most = self._scratch.workspace.token_capacity
        most = max(rows, min(plan.rows, most) if plan.rows else most)
        return self._scratch.workspace.get("logits/tile", (rows, weight.rows), capacity=most * weight.rows)

    def _tiles(self, plan: HeadPlan) -> list[tuple[int, QuantMatrix]]:
        cuts = vocabulary_tiles(self.weight.rows, plan.tiles)
        return [(first, self.weight.row_slice(first, stop)) for first, stop in cuts]


def vocabulary_tiles(vocabulary: int, tiles: int) -> list[tuple[int, int]]:
    """[first, stop) of at most `tiles` tiles of equal size, but for the last."""
    size = -(-vocabulary // tiles)
    if tiles > 1:
        size = -(-size // TILE_MULTIPLE) * TILE_MULTIPLE
    return [(first, min(first + size, vocabulary)) for first in range(0, vocabulary, size)]


def _chunks(count: int, rows: int) -> list[tuple[int, int]]:
    size = rows or count
    return [(first, min(first + size, count)) for first in range(0, count, size)]
