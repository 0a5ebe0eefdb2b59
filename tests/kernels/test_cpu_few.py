"""`matmul_few`: near float64, and bit for bit independent of batch, order, threads and instruction set."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from numba import cfunc

from retrograd.gguf.formats import dequantise
from retrograd.kernel_table import FrozenKernelTable
from retrograd_hookspecs import BuildContext, DeviceInfo, KernelError, QuantMatrix
from retrograd_plugins.kernels.cpu import _rows_activations, _rows_product
from retrograd_plugins.kernels.cpu._decode import FORMATS
from retrograd_plugins.kernels.cpu._few import FewOps, products_kind
from retrograd_plugins.kernels.cpu._gemm_workspace import Workspace
from retrograd_plugins.kernels.cpu._rows import ROWS_FORMATS, UNPACK_SIGNATURE
from retrograd_plugins.kernels.cpu._rows_kinds import (
    BLOCK,
    MADD_256,
    RECORD,
    SIGNED_BIAS,
    TILES,
    VNNI_256,
    VNNI_512,
)
from retrograd_plugins.kernels.cpu._simd_features import jit_disabled, target_features, usable_variants
from retrograd_plugins.kernels.cpu._simd_rows import ROWS

from .cpu_weights import Doubles, Floats, halves, make_ops, make_weight, multiply, normal, row_error

PYTHON = jit_disabled()
needs_jit = pytest.mark.skipif(PYTHON, reason="about compiled code; the JIT is switched off")
QUANTS = [name for name, entry in ROWS_FORMATS.items() if not entry.floats]
FLOATS = [name for name, entry in ROWS_FORMATS.items() if entry.floats]
VARIANTS = [] if PYTHON else [name for name in usable_variants() if products_kind(name) is not None]
NEEDS = {
    VNNI_512: {"avx512f", "avx512bw", "avx512vnni"},
    VNNI_256: {"avxvnni", "avx2", "fma"},
    MADD_256: {"avx2", "fma"},
}
KINDS = [] if PYTHON else [kind for kind, needs in NEEDS.items() if needs <= target_features()]

TOLERANCE = 1e-2
"""Of the norm of a row: what rounding activations to 8 bits costs."""


def make_few(name: str, kind: int, threads: int = 2) -> FewOps:
    return FewOps(make_ops(name, "portable"), kind, threads, Workspace())


def few(ops: FewOps, x: Floats, weight: QuantMatrix) -> Floats:
    out = np.full((len(x), weight.rows), np.nan, np.float32)
    ops.matmul_few(x, weight, out)
    return out


def rounded(x: Floats) -> Doubles:
    """Activations as the kernels round them, in float64."""
    blocks = x.reshape(len(x), -1, BLOCK)
    scale = np.abs(blocks).max(2, keepdims=True) / np.float32(127)
    inverse = np.float32(127) / np.abs(blocks).max(2, keepdims=True)
    quants = np.rint(blocks * inverse).astype(np.float64)
    return np.asarray(scale.astype(np.float64) * quants).reshape(x.shape)


def exact(weight: QuantMatrix) -> Doubles:
    return dequantise(weight.data, weight.format).astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", QUANTS)
def test_quantised_products_match_float64(name: str, kind: int) -> None:
    weight = make_weight(name, 70, 512)
    x = normal(11, 512)
    found = few(make_few(name, kind), x, weight)
    assert row_error(found, rounded(x) @ exact(weight).T) < 2e-6, "with activations as they were rounded"
    assert row_error(found, x.astype(np.float64) @ exact(weight).T) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FLOATS)
def test_float_products_round_no_activation(name: str, kind: int) -> None:
    weight = make_weight(name, 70, 512)
    x = normal(11, 512)
    found = few(make_few(name, kind), x, weight)
    assert row_error(found, x.astype(np.float64) @ exact(weight).T) < 2e-6
    for variant in VARIANTS:
        if variant != "amx":
            np.testing.assert_array_equal(found, multiply(make_ops(name, variant), x, weight))


@pytest.mark.parametrize("name", QUANTS)
def test_instruction_sets_agree_bit_for_bit(name: str) -> None:
    weight = make_weight(name, 48, 768)
    x = normal(7, 768)
    results = [few(make_few(name, kind), x, weight) for kind in KINDS]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@needs_jit
@pytest.mark.parametrize(
    ("tokens", "columns", "rows"),
    [(1, 576, 192), (8, 1536, 576), (3, 640, 4097), (130, 576, 31), (2, 32, 1), (5, 96, 15), (1, 2048, 16)],
)
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "BF16"])
def test_sizes_of_real_models(name: str, tokens: int, columns: int, rows: int) -> None:
    weight = make_weight(name, rows, columns)
    x = normal(tokens, columns)
    found = few(make_few(name, KINDS[0]), x, weight)
    expected = x.astype(np.float64) @ exact(weight).T
    scale = np.abs(x).astype(np.float64) @ np.abs(exact(weight)).T
    assert (np.abs(found - expected) <= TOLERANCE * scale).all()
    if rows > 1:
        assert row_error(found, expected) < (2 * TOLERANCE if rows < 20 else TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "columns"), [("Q4_1", 96), ("Q8_0", 64), ("Q6_K", 256), ("F16", 64)])
def test_a_row_does_not_depend_on_the_others(
    name: str, columns: int, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bitwise rule: any number of rows, in any order, beside any others, over chunks of tokens."""
    monkeypatch.setattr(_rows_product, "CHUNK", 16)
    monkeypatch.setattr(_rows_product, "SERIAL_WORK", 1 << 17)
    most = 40
    weight = make_weight(name, 72, columns)
    ops = make_few(name, kind)
    x = normal(most, columns)
    whole = few(ops, x, weight)
    for count in range(1, most):
        np.testing.assert_array_equal(few(ops, x[:count], weight), whole[:count])
    rng = np.random.default_rng(5)
    for count in (1, 2, 19, most):
        order = rng.permutation(most)[:count]
        np.testing.assert_array_equal(few(ops, x[order], weight), whole[order])
    beside = x.copy()
    beside[1:] = np.nan
    np.testing.assert_array_equal(few(ops, beside, weight)[0], whole[0])


@needs_jit
def test_rows_of_the_weight_do_not_depend_on_the_others() -> None:
    """A slice of the vocabulary gives the logits of the whole, slices shorter than a group too."""
    weight = make_weight("Q8_0", 500, 576)
    ops = make_few("Q8_0", KINDS[0])
    x = normal(9, 576)
    whole = few(ops, x, weight)
    for first, stop in ((0, 100), (99, 402), (490, 500), (499, 500)):
        np.testing.assert_array_equal(few(ops, x, weight.row_slice(first, stop)), whole[:, first:stop])


@needs_jit
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight("Q5_0", 1111, 96)
    x = normal(150, 96)
    expected = few(make_few("Q5_0", KINDS[0], threads=1), x, weight)
    for threads in (2, 3, 7):
        np.testing.assert_array_equal(few(make_few("Q5_0", KINDS[0], threads), x, weight), expected)
    monkeypatch.setattr(_rows_product, "SERIAL_WORK", 1 << 40)
    np.testing.assert_array_equal(few(make_few("Q5_0", KINDS[0]), x, weight), expected)


@needs_jit
def test_two_python_threads_take_turns() -> None:
    weight = make_weight("Q4_K", 600, 512)
    ops = make_few("Q4_K", KINDS[0])
    batches = [normal(1 + 3 * i, 512, seed=i) for i in range(6)]
    expected = [few(ops, x, weight) for x in batches]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(10):
            found = list(pool.map(lambda x: few(ops, x, weight), batches))
            for left, right in zip(found, expected, strict=True):
                np.testing.assert_array_equal(left, right)


@needs_jit
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("kind", KINDS)
def test_extremes_do_not_overflow(name: str, kind: int) -> None:
    """Quants and activations of the largest size, all of one sign: the most that integers must hold."""
    width = FORMATS[name].bytes * 256 // FORMATS[name].values
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        data = np.full((20, width), byte, np.uint8)
        # Scales of one, wherever the format keeps them.
        for at in range(0, width, FORMATS[name].bytes):
            one = np.array([1.0, 1.0], np.float16).view(np.uint8)
            if name == "Q6_K":
                data[:, at + 208 : at + 210] = one[:2]
            else:
                data[:, at : at + (4 if name == "Q4_1" else 2)] = one[: 4 if name == "Q4_1" else 2]
        weight = QuantMatrix(name="extreme", format=name, data=data, columns=256)
        for x in (np.full((1, 256), 3.0, np.float32), np.full((1, 256), -3.0, np.float32)):
            found = few(make_few(name, kind), x, weight)
            np.testing.assert_allclose(found, x.astype(np.float64) @ exact(weight).T, rtol=1e-6)


@needs_jit
@pytest.mark.parametrize("kind", KINDS)
def test_odd_activations(kind: int) -> None:
    """Zeros give zeros, tiny and huge values keep their precision, one that is not finite shows."""
    weight = make_weight("Q4_1", 32, 128)
    ops = make_few("Q4_1", kind)
    x = normal(1, 128)
    assert (few(ops, np.zeros((1, 128), np.float32), weight) == 0).all()
    for factor in (2.0**-80, 2.0**80):
        scaled = x * np.float32(factor)
        assert row_error(few(ops, scaled, weight), scaled.astype(np.float64) @ exact(weight).T) < TOLERANCE
    for value in (np.nan, np.inf, -np.inf):
        broken = np.concatenate([x, x])
        broken[1, 77] = value
        found = few(ops, broken, weight)
        assert not np.isfinite(found[1]).any()
        np.testing.assert_array_equal(found[:1], few(ops, x, weight))


@needs_jit
def test_widths_that_are_no_whole_blocks_are_left_to_matmul() -> None:
    weight = make_weight("F16", 20, 75)
    x = normal(3, 75)
    ops = make_few("F16", KINDS[0])
    np.testing.assert_array_equal(few(ops, x, weight), multiply(make_ops("F16", "portable"), x, weight))


@needs_jit
def test_arguments_that_do_not_fit_are_refused() -> None:
    weight = make_weight("Q8_0", 20, 64)
    ops = make_few("Q8_0", KINDS[0])
    x, out = normal(2, 64), np.empty((2, 20), np.float32)
    with pytest.raises(KernelError, match=r"x must be .* shape \(2, 64\), not float64"):
        ops.matmul_few(x.astype(np.float64), weight, out)
    with pytest.raises(KernelError, match="out must be"):
        ops.matmul_few(x, weight, np.empty((2, 21), np.float32))
    with pytest.raises(KernelError, match="not contiguous"):
        ops.matmul_few(np.asfortranarray(x), weight, out)
    read_only = out.copy()
    read_only.flags.writeable = False
    with pytest.raises(KernelError, match="writeable"):
        ops.matmul_few(x, weight, read_only)
    wrong = attrs.evolve(weight, name="wrong", columns=96)
    with pytest.raises(KernelError, match="'wrong': 96 columns of Q8_0"):
        ops.matmul_few(normal(2, 96), wrong, out)
    assert few(ops, normal(0, 64), weight).shape == (0, 20)
    x.flags.writeable = False
    assert few(ops, x, weight).shape == (2, 20)


@needs_jit
def test_weights_of_a_real_model(smollm2_path: Path) -> None:
    from retrograd.gguf import open_model

    file = open_model(smollm2_path)
    for tensor in ("blk.0.attn_k.weight", "blk.29.ffn_down.weight"):
        weight = file.matrix(tensor)
        x = normal(6, weight.columns)
        found = few(make_few(weight.format, KINDS[0]), x, weight)
        assert row_error(found, x.astype(np.float64) @ exact(weight).T) < TOLERANCE


# The functions of sixteen rows, compiled and as Python.


def records_of(x: Floats, bias: int, floats: bool) -> npt.NDArray[np.uint8]:
    """Records (block, token) of x, made by the Python form of the conversion."""
    size, record = (8, 32) if floats else (BLOCK, RECORD)
    blocks = []
    for first in range(0, x.shape[1], size):
        for row in x:
            target = np.zeros(record, np.uint8)
            if floats:
                _rows_activations.copy_block(row[first : first + size], target)
            else:
                _rows_activations.round_block(row[first : first + size], target, bias)
            blocks.append(target)
    return np.concatenate(blocks)


def aligned(count: int) -> Floats:
    raw = np.zeros(count + 16, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    return raw[start : start + count]


@pytest.mark.parametrize("name", ROWS_FORMATS)
def test_python_and_compiled_forms_agree(name: str) -> None:
    entry = ROWS_FORMATS[name]
    weight = make_weight(name, ROWS, 256)
    x = normal(3, 256)
    records = records_of(x, entry.bias, entry.floats)
    blocks = 256 // FORMATS[name].values
    sums = aligned(3 * ROWS)
    entry.make(VNNI_512)(weight.data.reshape(-1), weight.data.shape[1], blocks, records, 3, sums)
    expected = (x.astype(np.float64) if entry.floats else rounded(x)) @ exact(weight).T
    assert row_error(sums.reshape(3, ROWS), expected) < 2e-6
    for kind in KINDS:
        function: Any = cfunc(UNPACK_SIGNATURE)(entry.make(kind))
        found = aligned(3 * ROWS)
        arguments = (weight.data.shape[1], blocks, records.ctypes.data, 3, found.ctypes.data)
        function.ctypes(weight.data.ctypes.data_as(function.ctypes.argtypes[0]), *arguments)
        np.testing.assert_allclose(found, sums, rtol=1e-4, atol=1e-5)


@needs_jit
@pytest.mark.parametrize("bias", [0, 8, SIGNED_BIAS])
def test_activations_are_rounded_to_even(bias: int) -> None:
    """The compiled conversion makes the records of the Python form."""
    x = np.concatenate(
        [normal(4, 64), np.arange(-64, 64, 0.5, dtype=np.float32).reshape(4, 64), np.zeros((1, 64))]
    )
    x = np.ascontiguousarray(x, np.float32)
    convert: Any = cfunc(_rows_product.CONVERT_SIGNATURE)(_rows_activations.round_tokens)
    found = np.zeros(len(x) * 2 * RECORD, np.uint8)
    convert.ctypes(x.ctypes.data, 64, len(x), 64, found.ctypes.data, bias)
    np.testing.assert_array_equal(found, records_of(x, bias, False))


@needs_jit
@pytest.mark.skipif("avx512bf16" not in target_features(), reason="tiles need AVX512-BF16")
@pytest.mark.parametrize("name", ROWS_FORMATS)
def test_tiles_hold_the_decoded_weights(name: str) -> None:
    """The right operands of AMX products: pairs of columns, the halves of ggml's float32."""
    data = np.random.default_rng(3).integers(
        0, 256, (ROWS, make_weight(name, 1, 512).data.shape[1]), np.uint8
    )
    data = make_weight(name, ROWS, 512).data if ROWS_FORMATS[name].floats else data
    weight = QuantMatrix(name="random", format=name, data=data, columns=512)
    with np.errstate(all="ignore"):
        expected = halves(dequantise(data, name))
    function: Any = cfunc(UNPACK_SIGNATURE)(ROWS_FORMATS[name].make(TILES))
    target = aligned(512 // 32 * 1024)
    blocks = 512 // FORMATS[name].values
    pointer = weight.data.ctypes.data_as(function.ctypes.argtypes[0])
    function.ctypes(pointer, data.shape[1], blocks, 0, 0, target.ctypes.data)
    tiles = target.view(np.uint16).reshape(16, 2, 1024)[:, 0].reshape(16, 2, 16, ROWS, 2)
    found = (tiles.transpose(1, 3, 0, 2, 4).reshape(2, ROWS, 512).astype(np.uint32) << 16).view(np.float32)
    usable = np.isfinite(expected[0]) & (np.abs(expected[0]) > 1e-30)
    assert usable.mean() > 0.5
    for half in range(2):
        np.testing.assert_array_equal(found[half][usable], expected[half][usable])


# Registration, caching, other processors.


@needs_jit
@pytest.mark.parametrize("name", ROWS_FORMATS)
def test_each_variant_offers_the_op(name: str) -> None:
    module = importlib.import_module(f"retrograd_plugins.kernels.cpu.matmul_{name.lower()}")
    [component] = module.retrograd_kernels()

    class Backend:
        variants = usable_variants()
        device = DeviceInfo(backend="cpu", description="", threads=2)

        def shared(self, key: str, make: Any) -> Any:
            return make()

    services = {"backend": Backend()}
    kernels = component.build(
        component.config(), BuildContext(config=None, base_dir=Path(), services=services)
    )
    offered = {kernel.variant: kernel for kernel in kernels if kernel.op == "matmul_few"}
    assert list(offered) == list(reversed(VARIANTS))
    table = FrozenKernelTable(kernels, Backend.device)
    assert table.serving("matmul_few", name).variant == VARIANTS[0]
    Backend.variants = ("portable",)
    kernels = component.build(
        component.config(), BuildContext(config=None, base_dir=Path(), services=services)
    )
    assert FrozenKernelTable(kernels, Backend.device).serving("matmul_few", name).op == "matmul"


CACHED = """
import numpy as np
from tests.kernels.cpu_weights import *
from retrograd_plugins.kernels.cpu import _rows_drivers
from retrograd_plugins.kernels.cpu._few import FewOps
ops = FewOps(make_ops("Q4_K", "portable"), {kind}, 2, Workspace())
for rows in (16, 4096):
    weight = make_weight("Q4_K", rows, 256)
    ops.matmul_few(normal(3, 256), weight, np.empty((3, rows), np.float32))
drivers = (_rows_drivers.rows_serial, _rows_drivers.rows_parallel)
holders = ops._product._compiled
print(sum(sum(d.stats.cache_misses.values()) for d in drivers), sum(not h.cache_hits for h in holders))
"""


@needs_jit
def test_a_second_process_compiles_nothing(tmp_path: Path, repo_root: Path) -> None:
    command = [sys.executable, "-c", CACHED.format(kind=KINDS[0])]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, cwd=repo_root
        ).stdout.split()
        for _ in range(2)
    )
    assert [int(count) for count in first] != [0, 0]
    assert [int(count) for count in second] == [0, 0]


OLDER = """
import numpy as np
from tests.kernels.test_cpu_few import *
assert products_kind("avx2") == MADD_256 and products_kind("avx512") == MADD_256, products_kind("avx2")
for name in ROWS_FORMATS:
    weight = make_weight(name, 32, 256)
    x = normal(3, 256)
    found = few(make_few(name, MADD_256), x, weight)
    np.save(f"{folder}/{{name}}.npy", found)
"""


@needs_jit
@pytest.mark.skipif(MADD_256 not in KINDS, reason="this processor has no AVX2")
def test_a_processor_with_avx2_alone_gives_the_same_bits(tmp_path: Path, repo_root: Path) -> None:
    """Compiled for one without AVX512 and VNNI, where LLVM splits the lanes."""
    features = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+lzcnt,+movbe"
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", OLDER.format(folder=tmp_path)]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=repo_root, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for name in ROWS_FORMATS:
        expected = few(make_few(name, KINDS[0]), normal(3, 256), make_weight(name, 32, 256))
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), expected)
