"""Contract of kernels: `check_kernel_impls` raises `AssertionError` where it is broken.

Minimal example, in the tests of a distribution with kernels::

    from retrograd_plugins.kernels.reference import rms_norm as reference

    oracle = reference.build(NoConfig(), context)
    check_kernel_impls(my_impls, my_backend, oracle)

Each implementation is compared with the oracle's implementation of the same op on the cases of
`retrograd.testing.kernel_cases`: sizes that fit no block, one token, windows, caps, shared contexts,
results in place of arguments. Then the bitwise rule: a row alone, or in a slice of the call, must come out
with the bits it has in the whole call; for attention, a token in every layout of its sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.kernel_table import FrozenKernelTable
from retrograd_hookspecs import ANY_FORMAT, FUSED, STAND_INS, Backend, DeviceInfo, KernelImpl, QuantMatrix

from .attention_cases import check_attention_layouts
from .fused_cases import flattened
from .kernel_case import KernelCase, SameAs
from .kernel_cases import kernel_cases

TOLERANCES: Mapping[str, float] = MappingProxyType({"amx": 8e-3, "dequantise": 8e-3})
"""Tolerances of variants that multiply in less than float32 (bfloat16: 8 bits), or may, by the processor."""

Outputs = dict[str, npt.NDArray[Any]]


def check_kernel_impls(
    impls: Iterable[KernelImpl],
    backend: Backend,
    oracle: Iterable[KernelImpl],
    *,
    tolerances: Mapping[str, float] = TOLERANCES,
    seed: int = 0,
) -> int:
    """Check implementations for `backend` against the oracle's; returns how many were checked.

    `oracle` are the implementations of the backend `reference`. `tolerances` gives, by variant, the
    largest error relative to the largest value of an output where the case's own (float32) is too strict.
    """
    truth = {impl.op: impl for impl in oracle}
    checked = list(impls)
    for given_impl in checked:
        impl = given_impl
        exact = truth.get(impl.op) or truth.get(STAND_INS.get(impl.op, ""))
        if impl.op in FUSED and set(FUSED[impl.op]) <= truth.keys():
            exact = _flat(FrozenKernelTable(truth.values(), _ORACLE).serving(impl.op, impl.format))
            impl = _flat(impl)
        if exact is None:
            raise AssertionError(f"the oracle has no {impl.op!r} to compare with; pass all its kernels")
        for case in kernel_cases(impl.op, _weight_formats(impl), seed):
            where = f"{impl.op} ({impl.format or 'no weights'}, {impl.variant}), {case.label}"
            tolerance = max(case.tolerance, tolerances.get(impl.variant, 0.0))
            _check_values(case, impl, exact, backend, tolerance, where)
            if case.by_row:
                _check_rows(case, impl, backend, where)
    given = {impl.op: impl.fn for impl in checked}
    if "attention" in given:
        check_attention_layouts(given["attention"], given.get("attention_backward"), backend, seed)
    return len(checked)


_ORACLE = DeviceInfo(backend="oracle", description="the kernels that others are compared with")


def _flat(impl: KernelImpl) -> KernelImpl:
    return attrs.evolve(impl, fn=flattened(impl.op, impl.fn))


def run_kernel(case: KernelCase, impl: KernelImpl, backend: Backend) -> Outputs:
    """Outputs of an implementation on a case, as host arrays; a returned number is the output "result"."""
    arguments = _device_arguments(case, backend, backend.compute_dtype)
    returned = impl.fn(*arguments.values())
    outputs = {name: np.array(backend.to_host(arguments[name])) for name in case.outputs if name != "result"}
    if "result" in case.outputs:
        outputs["result"] = np.array(returned)
    return outputs


def _weight_formats(impl: KernelImpl) -> tuple[str, ...]:
    if impl.format == ANY_FORMAT:
        return ("F32", "Q8_0", "Q4_K")
    return (impl.format,)


def _device_arguments(case: KernelCase, backend: Backend, dtype: np.dtype[Any]) -> dict[str, Any]:
    placed: dict[str, Any] = {}
    for name, value in case.arguments.items():
        if isinstance(value, SameAs):
            placed[name] = placed[value.name]
        elif isinstance(value, QuantMatrix):
            placed[name] = backend.upload(value)
        elif isinstance(value, np.ndarray):
            cast = value.dtype.kind == "f" and name not in case.float32
            placed[name] = backend.from_host(np.array(value, dtype if cast else value.dtype))
        else:
            placed[name] = value
    return placed


class _HostBackend:
    """Where the oracle runs: NumPy arrays in float64."""

    compute_dtype: np.dtype[Any] = np.dtype(np.float64)

    def from_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def to_host(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(array)

    def upload(self, matrix: QuantMatrix) -> QuantMatrix:
        return matrix


def _check_values(
    case: KernelCase, impl: KernelImpl, truth: KernelImpl, backend: Backend, tolerance: float, where: str
) -> None:
    expected = run_kernel(case, truth, _HostBackend())  # type: ignore[arg-type]
    found = run_kernel(case, impl, backend)
    for name, wanted in expected.items():
        got = found[name].astype(np.float64)
        special = ~np.isfinite(wanted)
        assert np.array_equal(got[special], wanted[special], equal_nan=True), (
            f"{where}: {name} differs where the oracle gives infinities"
        )
        rest = ~special
        largest = float(np.abs(wanted[rest]).max(initial=0.0)) or 1.0
        error = np.zeros(wanted.shape)
        error[rest] = np.abs(got[rest] - wanted[rest]) / largest
        assert error.max(initial=0.0) <= tolerance, (
            f"{where}: {name} is off by {error.max():.2e} of its largest value {largest:.3g}, more than"
            f" {tolerance:.0e}; first at index {np.unravel_index(int(error.argmax()), error.shape)}"
        )


def _check_rows(case: KernelCase, impl: KernelImpl, backend: Backend, where: str) -> None:
    whole = run_kernel(case, impl, backend)
    rows = len(case.arguments[case.by_row[0]])
    for first, last in {(0, 1), (rows // 2, rows // 2 + 1), (rows - 1, rows), (rows // 3, rows)}:
        part = run_kernel(case.rows(first, last), impl, backend)
        for name in case.outputs:
            if name in case.by_row:
                assert np.array_equal(part[name], whole[name][first:last], equal_nan=True), (
                    f"{where}: rows [{first}, {last}) of {name} have other bits alone than among {rows} rows"
                )
