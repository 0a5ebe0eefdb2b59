"""Cases of fused ops: they take sequences, which a case holds one by one and `flattened` joins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from retrograd_hookspecs import LowRank, QuantMatrix

from .kernel_case import KernelCase, Random, normal
from .quants import random_weights

SCALE = 1.75


def flattened(op: str, fn: Callable[..., Any]) -> Callable[..., None]:
    """The fused op on the arguments of its cases: two projections, the first with an adapter."""

    def project(
        x: Any, w: QuantMatrix, plain: QuantMatrix, a: Any, b: Any, hidden: Any, out: Any, plain_out: Any
    ) -> None:
        adapter = LowRank(a=a, b=b, scale=SCALE, hidden=hidden)
        fn(x, [w, plain], [adapter, None], [out, plain_out])

    def project_backward(
        dout: Any,
        plain_dout: Any,
        x: Any,
        w: QuantMatrix,
        plain: QuantMatrix,
        a: Any,
        b: Any,
        hidden: Any,
        da: Any,
        db: Any,
        dx: Any,
        accumulate: bool,
    ) -> None:
        adapter = LowRank(a=a, b=b, scale=SCALE, hidden=hidden, da=da, db=db)
        fn([dout, plain_dout], x, [w, plain], [adapter, None], dx, accumulate)

    return project if op == "project" else project_backward


def fused_cases(op: str, name: str, rng: Random) -> Iterator[KernelCase]:
    """Cases of `project` and `project_backward` with weights of one format."""
    # 256 columns are whole blocks of every format.
    for tokens, columns, rank in ((1, 256, 1), (7, 512, 8), (70, 256, 33)):
        weights = []
        for rows in (33, 20):
            data = random_weights(rng, rows, columns, name, 0.1)
            data.flags.writeable = False
            weights.append(QuantMatrix(name=f"random {name}", format=name, data=data, columns=columns))
        x, out, plain_out = (normal(rng, tokens, size) for size in (columns, 33, 20))
        a, b = normal(rng, rank, columns) / np.float32(columns**0.5), normal(rng, 33, rank)
        operands = {"w": weights[0], "plain": weights[1], "a": a, "b": b}
        label = f"{tokens} tokens, {columns} columns, rank {rank}"
        if op == "project":
            results = {
                "hidden": np.full((tokens, rank), np.nan, np.float32),
                "out": np.full_like(out, np.nan),
                "plain_out": np.full_like(plain_out, np.nan),
            }
            yield KernelCase(
                op=op,
                label=label,
                arguments={"x": x, **operands, **results},
                outputs=tuple(results),
                by_row=("x", *results),
                tolerance=1e-5,
            )
            continue
        hidden = x @ a.T
        for accumulate in (False, True):
            results = {
                "da": normal(rng, rank, columns),
                "db": normal(rng, 33, rank),
                "dx": normal(rng, tokens, columns) if accumulate else np.full_like(x, np.nan),
            }
            given = {"dout": out, "plain_dout": plain_out, "x": x, **operands, "hidden": hidden}
            yield KernelCase(
                op=op,
                label=f"{label}, accumulate={accumulate}",
                arguments={**given, **results, "accumulate": accumulate},
                outputs=tuple(results),
                by_row=("dout", "plain_dout", "x", "hidden", "dx"),
                tolerance=1e-5,
            )
