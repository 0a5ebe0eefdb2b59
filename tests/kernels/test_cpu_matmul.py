"""Products with packed weights on the CPU: right, and bit for bit independent of the rest of the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.gguf.formats import dequantisable_formats, dequantise
from retrograd_hookspecs import ANY_FORMAT, FUSED, OPS_BY_FORMAT, STAND_INS, KernelError, QuantMatrix
from retrograd_plugins.kernels.cpu import _gemm
from retrograd_plugins.kernels.cpu._decode import FORMATS
from retrograd_plugins.kernels.cpu._gemm_expanded import ExpandedOps
from retrograd_plugins.kernels.cpu._simd_features import TILE_VARIANTS, has_fused_multiply_add, jit_disabled

from .cpu_weights import (
    all_variants,
    exact_gradient,
    exact_product,
    input_grad,
    make_ops,
    make_weight,
    multiply,
    normal,
    row_error,
)

VARIANTS = all_variants()
FLOAT_VARIANTS = tuple(name for name in VARIANTS if name not in TILE_VARIANTS)
PYTHON = jit_disabled()
needs_jit = pytest.mark.skipif(PYTHON, reason="about compiled code; the JIT is switched off")

TOLERANCE = 2e-6
"""Relative to the norm of a row; chains of up to 2048 float32 additions."""


@pytest.mark.parametrize(
    ("name", "variant"),
    # amx-bf16 differs from amx after the weights are unpacked: one format of each kind shows it.
    [(f, v) for v in VARIANTS for f in (FORMATS if v != "amx-bf16" else ("Q4_1", "Q6_K", "F16"))],
)
def test_products_match_float64(name: str, variant: str) -> None:
    weight = make_weight(name, 70, 512)
    ops = make_ops(name, variant)
    x, dout = normal(35, 512), normal(35, 70, seed=2)
    assert row_error(multiply(ops, x, weight), exact_product(x, weight, variant)) < TOLERANCE
    gradient = exact_gradient(dout, weight, variant)
    assert row_error(input_grad(ops, dout, weight), gradient) < TOLERANCE
    dx = normal(35, 512, seed=3)
    expected = dx + gradient
    ops.matmul_input_grad(dout, weight, dx, True)
    assert row_error(dx, expected) < TOLERANCE


@needs_jit
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("tokens", "columns", "rows"),
    [(512, 576, 192), (3, 2048, 2048), (130, 1536, 576), (1, 640, 4097), (17, 2304, 33), (2, 32, 1)],
)
def test_sizes_of_real_models(tokens: int, columns: int, rows: int, variant: str) -> None:
    weight = make_weight("Q4_1", rows, columns)
    ops = make_ops("Q4_1", variant)
    x, dout = normal(tokens, columns), normal(tokens, rows, seed=2)
    assert row_error(multiply(ops, x, weight), exact_product(x, weight, variant)) < 2 * TOLERANCE
    expected = exact_gradient(dout, weight, variant)
    assert row_error(input_grad(ops, dout, weight), expected) < 2 * TOLERANCE


@needs_jit
@pytest.mark.skipif("amx" not in VARIANTS, reason="this processor has no AMX")
def test_bfloat16_tiles_keep_the_precision_of_float32_forward() -> None:
    weight = make_weight("Q8_0", 256, 1536)
    matrix = dequantise(weight.data, weight.format).astype(np.float64)
    ops = make_ops("Q8_0", "amx")
    for tokens in (64, 65):
        x, dout = normal(tokens, 1536), normal(tokens, 256, seed=2)
        assert row_error(multiply(ops, x, weight), x @ matrix.T) < 4e-5
        assert row_error(input_grad(ops, dout, weight), dout @ matrix) < 4e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (37, 45), (33, 16), (301, 5)])
def test_plain_formats_take_any_width(name: str, variant: str, columns: int, rows: int) -> None:
    weight = make_weight(name, rows, columns)
    ops = make_ops(name, variant)
    values = np.abs(dequantise(weight.data, name)).astype(np.float32)
    absolute = QuantMatrix(name="absolute", format="F32", data=values.view(np.uint8), columns=columns)
    for tokens in (1, 13):
        x, dout = normal(tokens, columns), normal(tokens, rows, seed=2)
        found, expected = multiply(ops, x, weight), exact_product(x, weight, variant)
        scale = exact_product(np.abs(x), absolute, variant)
        assert (np.abs(found - expected) <= TOLERANCE * scale).all()
        found, expected = input_grad(ops, dout, weight), exact_gradient(dout, weight, variant)
        scale = exact_gradient(np.abs(dout), absolute, variant)
        assert (np.abs(found - expected) <= TOLERANCE * scale).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "columns"), [("Q4_1", 96), ("Q4_K", 256), ("F16", 75)])
def test_a_row_does_not_depend_on_the_others(name: str, columns: int, variant: str) -> None:
    """The bitwise rule: any number of rows, in any order, beside any others."""
    most, rows = (13, 24) if PYTHON else (70, 72)
    weight = make_weight(name, rows, columns)
    ops = make_ops(name, variant)
    x, dout = normal(most, columns), normal(most, rows, seed=2)
    whole, whole_grad = multiply(ops, x, weight), input_grad(ops, dout, weight)
    for count in range(1, most):
        np.testing.assert_array_equal(multiply(ops, x[:count], weight), whole[:count])
        np.testing.assert_array_equal(input_grad(ops, dout[:count], weight), whole_grad[:count])
    rng = np.random.default_rng(5)
    for count in (1, 2, most // 2, most):
        order = rng.permutation(most)[:count]
        np.testing.assert_array_equal(multiply(ops, x[order], weight), whole[order])
        np.testing.assert_array_equal(input_grad(ops, dout[order], weight), whole_grad[order])
    beside = x.copy()
    beside[1:] = np.nan
    np.testing.assert_array_equal(multiply(ops, beside, weight)[0], whole[0])


@needs_jit
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_long_batch_has_the_rows_of_a_short_one(variant: str) -> None:
    """Several depths, panels and chunks of tokens: blocking changes no bit."""
    weight = make_weight("Q4_K", 600, 2560)
    ops = make_ops("Q4_K", variant)
    x, dout = normal(300, 2560), normal(300, 600, seed=2)
    whole, whole_grad = multiply(ops, x, weight), input_grad(ops, dout, weight)
    for place in (0, 11, 299):
        np.testing.assert_array_equal(multiply(ops, x[place : place + 1], weight)[0], whole[place])
        np.testing.assert_array_equal(input_grad(ops, dout[place : place + 1], weight)[0], whole_grad[place])


@needs_jit
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_the_weight_do_not_depend_on_the_others(variant: str) -> None:
    """A slice of the vocabulary gives the logits of the whole."""
    weight = make_weight("Q8_0", 500, 576)
    ops = make_ops("Q8_0", variant)
    x = normal(9, 576)
    whole = multiply(ops, x, weight)
    for first, stop in ((0, 100), (99, 402), (499, 500)):
        part = multiply(ops, x, weight.row_slice(first, stop))
        np.testing.assert_array_equal(part, whole[:, first:stop])


@needs_jit
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocking_and_threads_change_no_bit(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight("Q5_0", 1111, 96)
    x, dout = normal(200, 96), normal(200, 1111, seed=2)
    ops = make_ops("Q5_0", variant)
    expected, expected_grad = multiply(ops, x, weight), input_grad(ops, dout, weight)
    for threads in (1, 3, 7):
        other = make_ops("Q5_0", variant, threads)
        np.testing.assert_array_equal(multiply(other, x, weight), expected)
        np.testing.assert_array_equal(input_grad(other, dout, weight), expected_grad)
    monkeypatch.setattr(_gemm, "GRADIENT_VALUES", 1)
    monkeypatch.setattr(_gemm, "task_blocks", lambda *_, step, token_block, **__: (step, 3 * token_block))
    monkeypatch.setattr(_gemm, "SERIAL_VALUES", 0)
    other = make_ops("Q5_0", variant, 3)
    np.testing.assert_array_equal(multiply(other, x, weight), expected)
    np.testing.assert_array_equal(input_grad(other, dout, weight), expected_grad)


@needs_jit
@pytest.mark.skipif(not has_fused_multiply_add(), reason="without fused multiply-add all still agree to 1e-6")
def test_float_variants_agree_bit_for_bit() -> None:
    weight = make_weight("Q6_K", 50, 768)
    x = normal(23, 768)
    results = [multiply(make_ops("Q6_K", variant), x, weight) for variant in FLOAT_VARIANTS]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_is_the_scaled_row(name: str) -> None:
    weight = make_weight(name, 40, 256)
    ids = np.array([3, 39, 0, 3], np.int32)
    ops = make_ops(name, VARIANTS[0])
    for scale in (1.0, 25.3):
        out = np.full((4, 256), np.nan, np.float32)
        ops.embedding(ids, weight, scale, out)
        np.testing.assert_array_equal(out, np.float32(scale) * dequantise(weight.data[ids], name))


def test_a_memory_map_is_read_as_it_is(tmp_path: Path) -> None:
    weight = make_weight("Q4_0", 12, 64)
    path = tmp_path / "weights"
    path.write_bytes(b"header" + weight.data.tobytes())
    data = np.memmap(path, np.uint8, "r", offset=6, shape=weight.data.shape)
    mapped = QuantMatrix(name="mapped", format="Q4_0", data=data, columns=64)
    ops = make_ops("Q4_0", VARIANTS[0])
    x, ids, out = normal(3, 64), np.array([11], np.int32), np.zeros((1, 64), np.float32)
    np.testing.assert_array_equal(multiply(ops, x, mapped), multiply(ops, x, weight))
    ops.embedding(ids, mapped, 1.0, out)
    np.testing.assert_array_equal(out, dequantise(weight.data[11:], "Q4_0"))


def test_a_weight_changed_in_place_is_read_anew() -> None:
    values = normal(8, 40)
    weight = QuantMatrix(name="trained", format="F32", data=values.view(np.uint8), columns=40)
    ops, other = make_ops("F32", VARIANTS[0]), ExpandedOps(make_ops("F32", VARIANTS[0]))
    x = normal(2, 40, seed=4)
    before = multiply(ops, x, weight)
    values *= 2
    np.testing.assert_array_equal(multiply(ops, x, weight), 2 * before)
    out = np.empty_like(before)
    other.matmul(x, weight, out)
    np.testing.assert_array_equal(out, 2 * before)


@pytest.mark.parametrize("name", sorted(set(dequantisable_formats()) - set(FORMATS) - {"F64"}))
def test_any_other_format_is_expanded(name: str) -> None:
    weight = make_weight(name, 20, 256)
    variant = VARIANTS[0]
    ops: Any = ExpandedOps(make_ops("F32", variant))
    x, dout = normal(4, 256), normal(4, 20, seed=2)
    for _ in range(2):
        assert row_error(multiply(ops, x, weight), exact_product(x, weight, variant)) < TOLERANCE
    assert row_error(input_grad(ops, dout, weight), exact_gradient(dout, weight, variant)) < TOLERANCE
    ids, out = np.array([19, 2, 19], np.int32), np.empty((3, 256), np.float32)
    ops.embedding(ids, weight, 2.0, out)
    np.testing.assert_array_equal(out, 2 * dequantise(weight.data, name)[ids])


@needs_jit
def test_weights_of_a_real_model(smollm2_path: Path) -> None:
    from retrograd.gguf import open_model

    file = open_model(smollm2_path)
    for tensor in ("blk.0.attn_q.weight", "blk.29.ffn_down.weight"):
        weight = file.matrix(tensor)
        matrix = dequantise(weight.data, weight.format).astype(np.float64)
        x = normal(6, weight.columns)
        for variant in VARIANTS:
            limit = {"amx": 4e-5, "amx-bf16": 8e-3}.get(variant, TOLERANCE)
            assert row_error(multiply(make_ops(weight.format, variant), x, weight), x @ matrix.T) < limit


@needs_jit
def test_two_python_threads_take_turns() -> None:
    weight = make_weight("Q8_0", 600, 512)
    ops = make_ops("Q8_0", VARIANTS[0])
    batches = [normal(40 + i, 512, seed=i) for i in range(6)]
    expected = [multiply(ops, x, weight) for x in batches]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(10):
            found = list(pool.map(lambda x: multiply(ops, x, weight), batches))
            for left, right in zip(found, expected, strict=True):
                np.testing.assert_array_equal(left, right)


# What is refused.


def test_arguments_that_do_not_fit_are_refused() -> None:
    weight = make_weight("Q8_0", 8, 64)
    ops = make_ops("Q8_0", VARIANTS[0])
    x, out = normal(2, 64), np.empty((2, 8), np.float32)
    with pytest.raises(KernelError, match=r"x must be .* shape \(2, 64\), not float64"):
        ops.matmul(x.astype(np.float64), weight, out)
    with pytest.raises(KernelError, match="out must be"):
        ops.matmul(x, weight, np.empty((2, 9), np.float32))
    with pytest.raises(KernelError, match="not contiguous"):
        ops.matmul(np.asfortranarray(x), weight, out)
    read_only = out.copy()
    read_only.flags.writeable = False
    with pytest.raises(KernelError, match="writeable"):
        ops.matmul(x, weight, read_only)
    with pytest.raises(KernelError, match="dout must be"):
        ops.matmul_input_grad(x, weight, x, False)
    wrong = QuantMatrix(name="wrong", format="Q8_0", data=weight.data, columns=96)
    with pytest.raises(KernelError, match="'wrong': 96 columns of Q8_0"):
        ops.matmul(normal(2, 96), wrong, out)
    with pytest.raises(KernelError, match=r"ids range over \[0, 8\] but .* 8 rows"):
        ops.embedding(np.array([0, 8], np.int32), weight, 1.0, np.empty((2, 64), np.float32))
    with pytest.raises(KernelError, match=r"\[-1, 0\]"):
        ops.embedding(np.array([0, -1], np.int32), weight, 1.0, np.empty((2, 64), np.float32))


def test_no_tokens_is_no_work() -> None:
    weight = make_weight("Q8_0", 8, 64)
    ops = make_ops("Q8_0", VARIANTS[0])
    assert multiply(ops, normal(0, 64), weight).shape == (0, 8)
    assert input_grad(ops, normal(0, 8), weight).shape == (0, 64)
    ops.embedding(np.empty(0, np.int32), weight, 1.0, np.empty((0, 64), np.float32))


def test_a_format_that_nobody_reads_is_refused() -> None:
    data = np.zeros((4, 34), np.uint8)
    ops = ExpandedOps(make_ops("F32", VARIANTS[0]))
    for name in ("I8", "Q9_9"):
        weight = QuantMatrix(name="odd", format=name, data=data, columns=34)
        with pytest.raises(KernelError, match="'odd'"):
            ops.matmul(normal(1, 34), weight, np.empty((1, 4), np.float32))


# Registration, caching, the JIT switched off.


class FakeBackend:
    """What kernels ask of the backend."""

    def __init__(self, variants: tuple[str, ...]) -> None:
        from retrograd_hookspecs import DeviceInfo

        self.variants = variants
        self.device = DeviceInfo(backend="cpu", description="", threads=1)
        self.made: dict[str, Any] = {}

    def shared(self, name: str, make: Any) -> Any:
        return self.made.setdefault(name, make()) if name not in self.made else self.made[name]


@pytest.mark.parametrize("name", [*FORMATS, "any"])
def test_every_format_registers_its_ops(name: str) -> None:
    import importlib

    from retrograd_hookspecs import BuildContext

    module = importlib.import_module(f"retrograd_plugins.kernels.cpu.matmul_{name.lower()}")
    [component] = module.retrograd_kernels()
    assert component.name == f"cpu.matmul_{name.lower()}"
    backend = FakeBackend(("avx2", "portable"))
    context = BuildContext(config=None, base_dir=Path(), services={"backend": backend})
    kernels = component.build(component.config(), context)
    if name == "any":
        assert {kernel.op for kernel in kernels} == set(OPS_BY_FORMAT) - set(STAND_INS) - set(FUSED)
        assert {(k.format, k.variant, k.fast) for k in kernels} == {(ANY_FORMAT, "dequantise", False)}
        return
    assert {kernel.op for kernel in kernels} <= set(OPS_BY_FORMAT)
    assert {kernel.op for kernel in kernels} >= set(OPS_BY_FORMAT) - set(STAND_INS) - set(FUSED)
    assert {k.format for k in kernels} == {name}
    priority = {k.variant: k.priority for k in kernels if k.op == "matmul"}
    assert priority["avx2"] > priority["portable"]
    assert not any(key.startswith("gemm.avx") for key in backend.made), "compiled before it was needed"


CACHED = """
import numba, numpy as np
from tests.kernels.cpu_weights import *
from retrograd_plugins.kernels.cpu import _gemm_drivers
ops = make_ops("Q4_K", {variant!r})
weight = make_weight("Q4_K", 40, 256)
multiply(ops, normal(3, 256), weight)
multiply(ops, normal(300, 256), weight)
input_grad(ops, normal(3, 40), weight)
ops.embedding(np.array([1], np.int32), weight, 1.0, np.empty((1, 256), np.float32))
drivers = [d for d in vars(_gemm_drivers).values() if isinstance(d, numba.core.dispatcher.Dispatcher)]
kernels = ops._kernels()
products = (kernels.forward, kernels.gradient)
holders = [ops._decoder, *(part for p in products for part in (p.convert, p.pack, p.multiply))]
print(sum(sum(d.stats.cache_misses.values()) for d in drivers), sum(not h.cache_hits for h in holders))
"""


@needs_jit
def test_a_second_process_compiles_nothing(tmp_path: Path, repo_root: Path) -> None:
    """Everything is found in Numba's cache on disk: drivers, decoder and kernels."""
    code = CACHED.format(variant=VARIANTS[0])
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, cwd=repo_root
        ).stdout.split()
        for _ in range(2)
    )
    assert [int(count) for count in first] != [0, 0]
    assert [int(count) for count in second] == [0, 0]


@needs_jit
def test_everything_runs_without_the_jit(repo_root: Path) -> None:
    """These tests once more in Python, on the portable variant."""
    names = " or ".join(("products", "plain", "depend", "embedding", "refused", "python_decoder"))
    files = ["tests/kernels/test_cpu_matmul.py", "tests/kernels/test_cpu_decode.py"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", names, *files],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=repo_root,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
