"""What the contract suite does not see of the CPU kernels: functions, threads, errors, caching."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import njit

from retrograd.testing.kernel_cases import kernel_cases
from retrograd.testing.kernels import run_kernel
from retrograd_hookspecs import KernelError
from retrograd_plugins.kernels.cpu import _math_lanes as lanes
from retrograd_plugins.kernels.cpu._math_tiles import tile_product, transpose_square
from retrograd_plugins.kernels.cpu._simd_features import jit_disabled
from tests.kernels.support import CPU_GROUPS, backend, kernels, op

needs_jit = pytest.mark.skipif(jit_disabled(), reason="the compiled form is switched off")


@njit
def exp_all(x: Any, out: Any) -> None:
    for i in range(0, x.size, 16):
        lanes.store_lanes(out, i, lanes.exp_lanes(lanes.load_lanes(x, i)))


@njit
def tanh_all(x: Any, out: Any) -> None:
    for i in range(0, x.size, 16):
        lanes.store_lanes(out, i, lanes.tanh_lanes(lanes.load_lanes(x, i)))


def test_exp_is_accurate() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-86.5, 88.7, 8192), rng.standard_normal(8192)]).astype(np.float32)
    found = np.empty_like(x)
    exp_all(x, found)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(found / exact - 1.0).max() < 1e-7


def test_exp_at_the_limits() -> None:
    x = np.array([0, -0.0, -86.6, -1e30, -np.inf, 88.73, np.inf, np.nan, *[1.0] * 8], np.float32)
    found = np.empty_like(x)
    exp_all(x, found)
    expected = np.array([1, 1, 0, 0, 0, np.inf, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(found[:8], expected)


def test_tanh_is_accurate() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-12, 12, 8192), 10.0 ** rng.uniform(-30, 1, 8192)]).astype(np.float32)
    found = np.empty_like(x)
    tanh_all(x, found)
    exact = np.tanh(x.astype(np.float64))
    assert np.abs(found / exact - 1.0).max() < 2e-7
    edges = np.array([0, 100, -100, np.inf, -np.inf, np.nan, *[1.0] * 10], np.float32)
    found = np.empty_like(edges)
    tanh_all(edges, found)
    np.testing.assert_array_equal(found[:6], np.array([0, 1, -1, 1, -1, np.nan], np.float32))


def product(a: Any, b: Any, c: Any, rows: Any, depth: Any) -> None:
    tile_product(4, 1, 1, a, 0, depth, 1, b, 0, 16, c, 0, 16, depth)
    tile_product(1, 1, 0, a, 0, depth, 1, b, 0, 16, c, 0, 16, rows)


def transpose(source: Any, target: Any) -> None:
    transpose_square(source, 3, 20, target, 0, 16)


@needs_jit
@pytest.mark.parametrize("depth", [1, 2, 33])
def test_tiles_compiled_and_as_python(depth: int) -> None:
    rng = np.random.default_rng(depth)
    a = rng.standard_normal(4 * depth).astype(np.float32)
    b = rng.standard_normal(16 * depth).astype(np.float32)
    found, expected = np.full(64, np.nan, np.float32), np.full(64, np.nan, np.float32)
    njit(product)(a, b, found, 1, depth)
    product(a, b, expected, 1, depth)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.sqrt(depth))
    exact = a.reshape(4, depth).astype(np.float64) @ b.reshape(depth, 16)
    exact[0] += np.float64(a[0]) * b[:16]
    np.testing.assert_allclose(found.reshape(4, 16), exact, rtol=0, atol=2e-6 * np.sqrt(depth))


@needs_jit
def test_transpose_compiled_and_as_python() -> None:
    source = np.random.default_rng(0).standard_normal(16 * 20 + 3).astype(np.float32)
    found, expected = np.empty(256, np.float32), np.empty(256, np.float32)
    njit(transpose)(source, found)
    transpose(source, expected)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found.reshape(16, 16).T, source[3:].reshape(16, 20)[:, :16])


@pytest.mark.parametrize("group", CPU_GROUPS)
def test_bits_do_not_depend_on_the_number_of_threads(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = numba.get_num_threads()
    for module in ("_math_common", "_attention_ops"):
        # So that small cases are split too.
        name = "SERIAL_ELEMENTS" if module == "_math_common" else "SERIAL_PRODUCTS"
        monkeypatch.setattr(f"retrograd_plugins.kernels.cpu.{module}.{name}", 0)
    for impl in kernels("cpu", group):
        for case in kernel_cases(impl.op):
            found = []
            for count in (1, threads, threads):
                numba.set_num_threads(count)
                found.append(run_kernel(case, impl, backend("cpu")))
            numba.set_num_threads(threads)
            for other in found[1:]:
                for name, value in found[0].items():
                    np.testing.assert_array_equal(other[name], value, err_msg=f"{case.label}: {name}")


def shared_gradients(answers: int, seed: int = 0) -> tuple[Any, ...]:
    """dk and dv of a prompt of 100 tokens and `answers` of 40, together and one answer a call."""
    rng = np.random.default_rng(seed)
    tokens = 100 + 40 * answers
    q, dout = (rng.standard_normal((tokens, 4, 32)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((tokens, 2, 32)).astype(np.float32) for _ in range(2))
    own = [[100 + 40 * n, 40, 0, 100, 100 + 40 * n] for n in range(answers)]
    calls = [[[0, 100, 0, 0, 0], *own], [[0, 100, 0, 0, 0]], *([segment] for segment in own)]
    results = []
    for call in calls:
        segments = np.array(call)
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        gradients = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
        op("cpu", "attention")(q, k, v, segments, 0.2, 0, 0.0, out, lse)
        op("cpu", "attention_backward")(dout, q, k, v, out, lse, segments, 0.2, 0, 0.0, *gradients)
        results.append(gradients[1:])
    return results[0], results[1:]


def test_gradients_of_a_shared_context_are_the_sum_over_its_segments() -> None:
    together, single = shared_gradients(5)
    for n in range(2):
        expected = np.sum([gradients[n].astype(np.float64) for gradients in single], axis=0)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(together[n], expected, rtol=0, atol=2e-6 * scale)


def test_gradients_of_a_shared_context_are_the_same_every_time() -> None:
    first, again = shared_gradients(3)[0], shared_gradients(3)[0]
    for n in range(2):
        np.testing.assert_array_equal(first[n], again[n])


def arrays(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "rows of out": (
        "rms_norm",
        arrays(x=(3, 4), weight=(4,)) | {"eps": 1e-5} | arrays(out=(2, 4), rstd=(3,)),
        r"rms_norm: out has shape \(2, 4\) where \(3, 4\) is needed",
    ),
    "weight": (
        "rms_norm_backward",
        arrays(dout=(3, 4), x=(3, 4), weight=(5,), rstd=(3,), dx=(3, 4)) | {"accumulate": False},
        r"weight has shape \(5,\)",
    ),
    "position": (
        "rope",
        arrays(x=(1, 1, 4))
        | {"positions": np.array([9], np.int32)}
        | arrays(cos=(9, 2), sin=(9, 2))
        | {"interleaved": False, "inverse": False},
        r"range over \[9, 9\] but the rotation table has 9 rows",
    ),
    "rotated values": (
        "rope",
        arrays(x=(1, 1, 2))
        | {"positions": np.array([0], np.int32)}
        | arrays(cos=(9, 2), sin=(9, 2))
        | {"interleaved": False, "inverse": False},
        "4 values of a head are to be rotated, but it has 2",
    ),
    "rank": (
        "lora_forward",
        arrays(x=(3, 4), a=(2, 4), b=(5, 3)) | {"scale": 1.0} | arrays(hidden=(3, 2), out=(3, 5)),
        r"a has shape \(2, 4\) where \(3, 4\)",
    ),
    "targets": (
        "softmax_grad_tile",
        arrays(logits=(3, 4))
        | {"first": 0, "targets": np.zeros(2, np.int32), "softcap": 0.0}
        | arrays(lse=(3,), dlogp=(3,)),
        r"targets has shape \(2,\)",
    ),
    "step": (
        "adamw",
        arrays(value=(3,), grad=(3,), first_moment=(3,), second_moment=(3,))
        | {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 0.0, "weight_decay": 0.0, "step": 0},
        "step 0 is not positive",
    ),
    "moments": (
        "sgd",
        arrays(value=(3,), grad=(3,), momentum_buffer=(4,)) | {"lr": 0.1, "momentum": 0.9, "decay": 0.0},
        r"momentum_buffer has shape \(4,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    op_name, arguments, message = WRONG[name]
    with pytest.raises(KernelError, match=message):
        op("cpu", op_name)(*arguments.values())


@pytest.mark.parametrize(
    ("segments", "groups", "message"),
    [
        ([[0, 4, 0, 0, 0]], 1, r"segment 0 is \[0, 4, 0, 0, 0\].*leaves the 3 queries or the 5 keys"),
        ([[0, 1, 0, 0, 0], [1, 1, 2, 4, 0]], 1, "segment 1"),
        ([[0, 2, 0, 0, 4]], 1, "segment 0"),
        ([[0, -1, 0, 0, 0]], 1, "segment 0"),
        ([[0, 1, 0, 0, 0]], 3, "number of query heads a multiple of the key heads"),
    ],
)
def test_segments_that_leave_the_arrays_are_refused(segments: Any, groups: int, message: str) -> None:
    q, k = np.ones((3, 4, 8), np.float32), np.ones((5, groups, 8), np.float32)
    with pytest.raises(KernelError, match=message):
        op("cpu", "attention")(
            q, k, k, np.array(segments), 1.0, 0, 0.0, np.empty_like(q), np.empty((3, 4), np.float32)
        )


def test_attention_of_large_scores_is_finite() -> None:
    q, k = np.full((70, 1, 16), 30.0, np.float32), np.full((70, 1, 16), 30.0, np.float32)
    k[::2] *= -1.0
    out, lse = np.empty_like(q), np.empty((70, 1), np.float32)
    op("cpu", "attention")(q, k, k, np.array([[0, 70, 0, 0, 0]]), 1.0, 0, 0.0, out, lse)
    np.testing.assert_array_equal(out[0], -30.0)
    np.testing.assert_allclose(out[1:], 30.0, rtol=2e-7)
    assert np.isfinite(lse).all()


def test_a_number_that_is_none_shows_in_the_result() -> None:
    q, k = np.ones((5, 1, 16), np.float32), np.ones((5, 1, 16), np.float32)
    q[3, 0, 7] = np.nan
    out, lse = np.empty_like(q), np.empty((5, 1), np.float32)
    op("cpu", "attention")(q, k, k, np.array([[0, 5, 0, 0, 0]]), 1.0, 0, 0.0, out, lse)
    assert np.isnan(out[3]).all()
    assert np.isnan(lse[3, 0])
    assert np.isfinite(out[[0, 1, 2, 4]]).all()


ROOT = Path(__file__).parents[2]

RUN_SMALL_CASES = """
import numpy as np
from retrograd.testing.kernel_cases import kernel_cases
from retrograd.testing.kernels import run_kernel
from tests.kernels.support import CPU_GROUPS, REFERENCE_GROUPS, all_kernels, backend
from retrograd_plugins.kernels.cpu._simd_features import jit_disabled

assert jit_disabled()
oracle = {impl.op: impl for impl in all_kernels("reference", REFERENCE_GROUPS)}
count = 0
for impl in all_kernels("cpu", CPU_GROUPS):
    for case in kernel_cases(impl.op):
        if max(getattr(value, "size", 0) for value in case.arguments.values()) > 20000:
            continue
        expected = run_kernel(case, oracle[impl.op], backend("reference"))
        for name, value in run_kernel(case, impl, backend("cpu")).items():
            finite = expected[name][np.isfinite(expected[name])]
            limit = 4e-6 * max(1.0, np.abs(finite).max(initial=0.0))
            where = f"{impl.op} {case.label}: {name}"
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=limit, err_msg=where)
        count += 1
print(count)
"""


def test_kernels_run_as_python_without_the_jit() -> None:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_SMALL_CASES],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 50


RUN_ATTENTION = """
import hashlib, json
import numpy as np
from tests.kernels.support import kernels
from retrograd_plugins.kernels.cpu import _attention_forward as forward

attention = next(impl.fn for impl in kernels("cpu", "attention") if impl.op == "attention")
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((70, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
attention(q, k, v, np.array([[0, 70, 0, 0, 0]]), 0.25, 0, 0.0, out, lse)
hits = sum(forward.attend.stats.cache_hits.values()) + sum(forward.forward.stats.cache_hits.values())
print(json.dumps([hits, hashlib.sha256(out.tobytes()).hexdigest()]))
"""


@needs_jit
def test_compiled_kernels_are_found_by_the_next_process(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", RUN_ATTENTION],
            cwd=ROOT,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads(done.stdout.splitlines()[-1]))
    assert [hits for hits, _ in results] == [0, 2]
    assert results[0][1] == results[1][1]


TARGETS = {
    "avx2": ("haswell", "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi2"),
    "sse2, without fused multiply-add": ("x86-64", "+sse2"),
}


@needs_jit
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="targets of x86-64")
@pytest.mark.parametrize("target", TARGETS)
def test_contract_on_older_processors(target: str, tmp_path: Path) -> None:
    name, features = TARGETS[target]
    settings = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/kernels/test_contract.py", "-k", "cpu_kernels_keep"],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(CPU_GROUPS)} passed" in done.stdout
