"""Activations in 16 bits: what NumPy makes of them, their range, and where modules use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd.kernel_table import FrozenKernelTable
from retrograd.nn import Workspace
from retrograd.nn.kept import KeptArrays
from retrograd_hookspecs import ABSENT, KernelError
from retrograd_plugins.backends.cpu import CpuConfig, build
from retrograd_plugins.kernels.cpu._simd_features import usable_variants
from retrograd_plugins.kernels.cpu.narrow import retrograd_kernels
from tests.kernels.support import backend, build_context, kernels

pytestmark = pytest.mark.skipif("amx" not in usable_variants(), reason="offered beside AMX products alone")


def table() -> FrozenKernelTable:
    return FrozenKernelTable(kernels("cpu", "narrow"), backend("cpu").device)


@pytest.mark.parametrize("shape", [(3, 5), (37, 31), (200, 129), (0, 8)])
def test_a_round_trip_is_that_of_float16_of_x_over_256(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 6, shape)).astype(np.float32)
    stored, found = np.empty(shape, np.uint16), np.empty(shape, np.float32)
    table().get("narrow")(x, stored)
    table().get("widen")(stored, found)
    expected = (x / np.float32(256)).astype(np.float16).astype(np.float32) * np.float32(256)
    np.testing.assert_array_equal(found, expected)
    assert (np.abs(found - x) <= np.maximum(np.abs(x) * 2.0**-11, 7.7e-6)).all()


def test_what_leaves_the_range_is_infinite_and_what_is_not_finite_stays_so() -> None:
    x = np.array([[1.6e7, 1.7e7, -1.7e7, np.inf, np.nan] + [1.0] * 13], np.float32)
    stored, found = np.empty(x.shape, np.uint16), np.empty_like(x)
    table().get("narrow")(x, stored)
    table().get("widen")(stored, found)
    assert found[0, 0] == pytest.approx(1.6e7, rel=1e-3)
    np.testing.assert_array_equal(found[0, 1:5], [np.inf, -np.inf, np.inf, np.nan])


def test_shapes_must_be_equal() -> None:
    with pytest.raises(KernelError, match="narrow: out has shape"):
        table().get("narrow")(np.zeros((2, 3), np.float32), np.zeros((3, 2), np.uint16))


def test_arrays_wait_in_16_bits_and_passes_without_gradients_keep_nothing() -> None:
    workspace = Workspace(backend("cpu"))
    kept = KeptArrays(table(), workspace.scope("scratch"))
    for keeps in (False, True):
        keep = workspace.scope("kept/0", keeps=keeps)
        x: Any = kept.fresh("gate", keep, 4, 6)
        x[...] = np.arange(24).reshape(4, 6)
        kept.save("gate", x, keep)
        assert dict(workspace.sizes()) == {"scratch/gate": 96} | ({"kept/0/gate": 48} if keeps else {})
    x[...] = 0
    np.testing.assert_array_equal(kept.load("gate", keep, 4, 6), np.arange(24).reshape(4, 6))


def test_without_the_ops_arrays_are_kept_as_they_are() -> None:
    empty = FrozenKernelTable([], backend("cpu").device)
    assert empty.serving("narrow").variant == ABSENT
    workspace = Workspace(backend("cpu"))
    kept, keep = KeptArrays(empty, workspace.scope("scratch")), workspace.scope("kept/0")
    x = kept.fresh("gate", keep, 4, 6)
    kept.save("gate", x, keep)
    assert kept.load("gate", keep, 4, 6) is not None
    assert dict(workspace.sizes()) == {"kept/0/gate": 96}


def test_float32_kernels_offer_none() -> None:
    (component,) = retrograd_kernels()
    floats = build(CpuConfig(kernels="avx512"), build_context())
    assert component.build(component.config(), build_context(backend=floats)) == []


@pytest.mark.parametrize("shape", [(3, 5), (37, 31), (200, 129), (2, 16)])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations_that_keep_have_the_bits_of_their_parts(kind: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    gate, up, dout = (4 * rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    impls = (*kernels("cpu", "narrow"), *kernels("cpu", "gated_activation"))
    get = FrozenKernelTable(impls, backend("cpu").device).get
    halves = [np.empty(shape, np.uint16) for _ in range(4)]
    floats = [np.full(shape, np.nan, np.float32) for _ in range(10)]
    one, other, wide_gate, wide_up, again, again_too, *slopes = floats

    get("gated_activation")(kind, gate, up, one)
    get("narrow")(gate, halves[0])
    get("narrow")(up, halves[1])
    get("gated_activation_keep")(kind, gate, up, other, halves[2], halves[3])
    get("widen")(halves[0], wide_gate)
    get("widen")(halves[1], wide_up)
    get("gated_activation")(kind, wide_gate, wide_up, again)
    get("gated_activation_kept")(kind, halves[2], halves[3], again_too)
    get("gated_activation_backward")(kind, dout, wide_gate, wide_up, slopes[0], slopes[1])
    get("gated_activation_kept_backward")(kind, dout, halves[2], halves[3], slopes[2], slopes[3])

    pairs = ((one, other), (halves[0], halves[2]), (halves[1], halves[3]), (again, again_too))
    for expected, found in (*pairs, (slopes[0], slopes[2]), (slopes[1], slopes[3])):
        np.testing.assert_array_equal(found, expected)
    assert not np.isnan(np.stack(floats)).any()
