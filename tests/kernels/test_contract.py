"""The contract suite over the built-in kernels: values against the oracle, and the bitwise rule."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from retrograd.testing.kernels import check_kernel_impls
from retrograd_hookspecs import OPS, OPTIONAL, KernelImpl
from retrograd_hookspecs.kernels import FUSED, STAND_INS
from retrograd_plugins.kernels.cpu._simd_features import jit_disabled
from tests.kernels.support import CPU_GROUPS, REFERENCE_GROUPS, all_kernels, backend, kernels


@pytest.mark.parametrize("group", CPU_GROUPS)
def test_cpu_kernels_keep_the_contract(group: str) -> None:
    oracle = all_kernels("reference", REFERENCE_GROUPS)
    checked = check_kernel_impls(kernels("cpu", group), backend("cpu"), oracle)
    assert checked == len(kernels("cpu", group)) > 0


@pytest.mark.parametrize("group", ["matmul_q4_1", "matmul_q8_0", "matmul_q4_k", "matmul_f16", "matmul_any"])
def test_cpu_kernels_that_read_weights_keep_the_contract(group: str) -> None:
    oracle = all_kernels("reference", ("matmul", "lora"))
    assert check_kernel_impls(kernels("cpu", group), backend("cpu"), oracle) == len(kernels("cpu", group))


@pytest.mark.parametrize("group", REFERENCE_GROUPS)
def test_reference_kernels_keep_the_bitwise_rule(group: str) -> None:
    oracle = all_kernels("reference", REFERENCE_GROUPS)
    check_kernel_impls(kernels("reference", group), backend("reference"), oracle)


def test_the_reference_serves_every_op() -> None:
    served = {impl.op for impl in all_kernels("reference", REFERENCE_GROUPS)}
    assert served == set(OPS) - set(STAND_INS) - set(FUSED) - set(OPTIONAL)


def test_variants_are_named() -> None:
    assert {impl.variant for impl in all_kernels("reference", REFERENCE_GROUPS)} == {"reference"}
    tiles = {"amx"} & set(backend("cpu").variants) if not jit_disabled() else set()
    assert {impl.variant for impl in all_kernels("cpu", CPU_GROUPS)} == {"numba", "numpy"} | tiles


def _broken(impl: KernelImpl, spoil: Any) -> KernelImpl:
    def fn(*arguments: Any) -> None:
        impl.fn(*arguments)
        spoil(*arguments)

    return attrs.evolve(impl, fn=fn)


def test_a_wrong_value_is_found() -> None:
    def spoil(x: Any, weight: Any, eps: float, out: Any, rstd: Any) -> None:
        out[-1, -1] += 1e-4 * abs(out).max()

    impl = next(impl for impl in kernels("cpu", "rms_norm") if impl.op == "rms_norm")
    with pytest.raises(AssertionError, match=r"rms_norm \(no weights, numba\), 1 x 5: out is off by"):
        check_kernel_impls([_broken(impl, spoil)], backend("cpu"), kernels("reference", "rms_norm"))


def test_a_result_that_depends_on_other_rows_is_found() -> None:
    def spoil(x: Any, weight: Any, eps: float, out: Any, rstd: Any) -> None:
        if len(x) > 3:
            np.nextafter(out, np.float32(np.inf), out=out)

    impl = next(impl for impl in kernels("cpu", "rms_norm") if impl.op == "rms_norm")
    with pytest.raises(AssertionError, match=r"rows \[0, 1\) of out have other bits alone than among 9 rows"):
        check_kernel_impls([_broken(impl, spoil)], backend("cpu"), kernels("reference", "rms_norm"))


def test_attention_that_depends_on_the_layout_is_found() -> None:
    def spoil(q: Any, k: Any, v: Any, segments: Any, *rest: Any) -> None:
        if len(segments) > 1 and len(q) > 200:
            rest[-1][...] = np.nextafter(rest[-1], np.float32(np.inf))

    impls = {impl.op: impl for impl in kernels("cpu", "attention")}
    with pytest.raises(AssertionError, match="lse of a packed sequence has other bits than alone"):
        check_kernel_impls(
            [_broken(impls["attention"], spoil)], backend("cpu"), kernels("reference", "attention")
        )


def test_an_op_without_oracle_is_refused() -> None:
    with pytest.raises(AssertionError, match="the oracle has no 'rope'"):
        check_kernel_impls(kernels("cpu", "rope"), backend("cpu"), kernels("reference", "rms_norm"))
