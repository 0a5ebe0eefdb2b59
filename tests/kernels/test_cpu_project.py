"""Fused projections on the CPU: the values of their parts, and the bitwise rule."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from retrograd.kernel_table import FrozenKernelTable
from retrograd_hookspecs import DeviceInfo, KernelError, KernelImpl, LowRank, QuantMatrix
from retrograd_plugins.kernels.cpu import _project, _project_layout
from retrograd_plugins.kernels.cpu._decode import FORMATS
from retrograd_plugins.kernels.cpu._gemm import WeightOps
from retrograd_plugins.kernels.cpu._gemm_workspace import Workspace
from retrograd_plugins.kernels.cpu._project import ProjectOps
from retrograd_plugins.kernels.cpu._simd_features import jit_disabled

from .cpu_weights import Floats, all_variants, load_variant, make_weight, normal, row_error
from .support import REFERENCE_GROUPS, all_kernels

pytestmark = pytest.mark.skipif(jit_disabled(), reason="fused kernels have a compiled form only")

VARIANTS = all_variants()
ORACLE = FrozenKernelTable(
    all_kernels("reference", REFERENCE_GROUPS), DeviceInfo(backend="reference", description="")
)
SCALE = 1.75

CASES = {
    "qkv": (("Q4_1", "Q4_1", "Q8_0"), (96, 32, 32), 96, 70, 8),
    "mixed blocks, one without an adapter": (("Q4_K", "Q6_K", "F32"), (100, 33, 7), 512, 37, 5),
    "no size fits a tile": (("F16",), (45,), 77, 3, 130),
    "deeper than a panel": (("Q4_1",), (48,), 2560, 130, 33),
    "ranks across a sub-panel": (("Q4_1", "Q4_0", "Q4_1"), (64, 32, 40), 64, 45, 20),
    "many rows": (("Q5_0",), (2600,), 64, 67, 16),
    "one token": (("Q5_0",), (40,), 32, 1, 1),
}


def make_ops(variant: str, threads: int = 2) -> ProjectOps:
    workspace = Workspace()
    kept: dict[str, WeightOps] = {}

    def weights(name: str) -> WeightOps:
        if name not in kept:
            kept[name] = WeightOps(FORMATS[name], lambda: load_variant(variant), threads, workspace)
        return kept[name]

    return ProjectOps(weights, lambda: load_variant(variant), threads, workspace)


@attrs.define
class Case:
    """Arguments of both ops."""

    weights: list[QuantMatrix]
    adapters: list[LowRank | None]
    x: npt.NDArray[Any]
    douts: list[npt.NDArray[Any]]

    def rows(self, picked: Any) -> Case:
        hidden = [one and attrs.evolve(one, hidden=one.hidden[picked].copy()) for one in self.adapters]
        return Case(self.weights, hidden, self.x[picked], [dout[picked] for dout in self.douts])


def make_case(name: str, dtype: Any = np.float32) -> Case:
    formats, rows, columns, tokens, rank = CASES[name]
    weights = [make_weight(one, n, columns) for one, n in zip(formats, rows, strict=True)]
    adapters: list[LowRank | None] = [
        LowRank(
            a=(normal(rank, columns, seed=5) / np.sqrt(columns)).astype(dtype),
            b=(0.1 * normal(n, rank, seed=6)).astype(dtype),
            scale=SCALE,
            hidden=np.full((tokens, rank), np.nan, dtype),
            da=normal(rank, columns, seed=7).astype(dtype),
            db=normal(n, rank, seed=8).astype(dtype),
        )
        for n in rows
    ]
    if len(adapters) == 3:
        adapters[1] = None
    douts = [normal(tokens, n, seed=9).astype(dtype) for n in rows]
    return Case(weights, adapters, normal(tokens, columns).astype(dtype), douts)


def results(
    project: Any, backward: Any, case: Case, *, accumulate: bool = False, precise: bool = False
) -> list[npt.NDArray[Any]]:
    """outs, dx, and hidden, da, db of each adapter."""
    dtype, tokens = case.x.dtype, len(case.x)
    adapters = [one and attrs.evolve(one, da=one.da.copy(), db=one.db.copy()) for one in case.adapters]
    outs = [np.full((tokens, weight.rows), np.nan, dtype) for weight in case.weights]
    dx = np.full(case.x.shape, 0.5 if accumulate else np.nan, dtype)
    project(case.x, case.weights, adapters, outs)
    backward(case.douts, case.x, case.weights, adapters, dx, accumulate, precise)
    return [*outs, dx, *(array for one in adapters if one for array in (one.hidden, one.da, one.db))]


def run(ops: ProjectOps, case: Case, **options: Any) -> list[npt.NDArray[Any]]:
    return results(ops.project, ops.project_backward, case, **options)


@pytest.mark.parametrize(("accumulate", "precise"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_parts_in_float64(
    name: str, variant: str, accumulate: bool, precise: bool
) -> None:
    case = make_case(name)
    found = run(make_ops(variant), case, accumulate=accumulate, precise=precise)
    op = ORACLE.get
    exact = results(
        op("project", "F32"),
        op("project_backward", "F32"),
        make_case(name, np.float64),
        accumulate=accumulate,
    )
    forward = len(case.weights)
    for place, (got, wanted) in enumerate(zip(found, exact, strict=True)):
        hidden = place > forward and (place - forward) % 3 == 1
        gradient = place >= forward and not hidden and not precise
        tolerance = {"amx": 8e-3 if gradient else 2e-4, "amx-bf16": 8e-3}.get(variant, 4e-6)
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < tolerance, f"result {place}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["qkv", "mixed blocks, one without an adapter"])
def test_a_token_does_not_depend_on_the_others(name: str, variant: str) -> None:
    """Across the number of tokens from which weights are packed, too."""
    case, ops = make_case(name), make_ops(variant)
    whole = run(ops, case)
    by_token = [place for place, one in enumerate(whole) if len(one) == len(case.x)]
    assert len(by_token) > len(case.weights)
    rng = np.random.default_rng(5)
    for count in (1, 2, 5, 16, 17, 33, len(case.x) - 1):
        picked = rng.permutation(len(case.x))[:count]
        part = run(ops, case.rows(picked))
        for place in by_token:
            np.testing.assert_array_equal(part[place], whole[place][picked])


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_an_adapter_the_bits_are_those_of_matmul(variant: str) -> None:
    ops = make_ops(variant)
    weights = [make_weight("Q4_1", 96, 160), make_weight("Q8_0", 40, 160)]
    for tokens in (3, 90):
        x = normal(tokens, 160)
        outs, expected = ([np.empty((tokens, w.rows), np.float32) for w in weights] for _ in range(2))
        ops.project(x, weights, [None, None], outs)
        for weight, out, single in zip(weights, outs, expected, strict=True):
            ops._weights(weight.format).matmul(x, weight, single)
            np.testing.assert_array_equal(out, single)


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_change_no_bit_and_slices_no_token(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("qkv")
    expected = run(make_ops(variant), case)
    for threads in (1, 3, 7):
        for got, wanted in zip(run(make_ops(variant, threads), case), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
    with monkeypatch.context() as patched:

        def narrow(*_: Any, step: int, token_block: int, **__: Any) -> tuple[int, int]:
            return step, token_block

        patched.setattr(_project_layout, "task_blocks", narrow)
        for got, wanted in zip(run(make_ops(variant), case), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
    monkeypatch.setattr(_project, "SLICE_VALUES", 1)
    monkeypatch.setattr(_project, "SLICE_TOKENS", 40)
    for got, wanted in zip(run(make_ops(variant), case), expected, strict=True):
        if len(wanted) == len(case.x):
            np.testing.assert_array_equal(got, wanted)
        else:
            assert row_error(got, wanted) < 1e-5


def test_arguments_that_do_not_fit_are_refused() -> None:
    case, ops = make_case("one token"), make_ops(VARIANTS[0])
    [weight], [adapter] = case.weights, case.adapters
    assert adapter is not None
    out = np.empty((1, weight.rows), np.float32)
    with pytest.raises(KernelError, match="out must be"):
        ops.project(case.x, [weight], [adapter], [out[:, :-1]])
    with pytest.raises(KernelError, match="b must be"):
        ops.project(case.x, [weight], [attrs.evolve(adapter, b=adapter.b[:-1])], [out])
    with pytest.raises(KernelError, match="hidden must be"):
        ops.project(case.x, [weight], [attrs.evolve(adapter, hidden=np.empty((2, 1)))], [out])
    with pytest.raises(KernelError, match="rank 0"):
        ops.project(case.x, [weight], [attrs.evolve(adapter, a=adapter.a[:0])], [out])
    with pytest.raises(KernelError, match="dout must be"):
        ops.project_backward([case.x], case.x, [weight], [adapter], case.x, False)


# What serves.


def _impl(op: str, variant: str, priority: int, fn: Any = None) -> KernelImpl:
    format = "Q8_0" if op in ("matmul", "project") else ""
    return KernelImpl(op=op, format=format, fn=fn or (lambda *_: None), variant=variant, priority=priority)


@pytest.mark.parametrize(
    ("matmul", "lora", "served"),
    [
        (("amx", 10), ("numba", 0), "amx"),
        (("mine", 5), ("numba", 0), "one by one"),
        (("amx", 10), ("mine", 50), "one by one"),
    ],
)
def test_a_replaced_part_is_not_passed_over(
    matmul: tuple[str, int], lora: tuple[str, int], served: str
) -> None:
    calls: list[str] = []
    impls = [
        _impl("matmul", *matmul, fn=lambda *_: calls.append("matmul")),
        _impl("lora_forward", *lora, fn=lambda *_: calls.append("lora")),
        _impl("project", "amx", 10, fn=lambda *_: calls.append("project")),
    ]
    table = FrozenKernelTable(impls, DeviceInfo(backend="cpu", description=""))
    assert table.serving("project", "Q8_0").variant == served
    case = make_case("one token")
    weight = make_weight("Q8_0", 40, 32)
    out: Floats = np.empty((1, 40), np.float32)
    table.get("project", "Q8_0")(case.x, [weight], case.adapters, [out])
    assert calls == (["project"] if served == "amx" else ["matmul", "lora"])
