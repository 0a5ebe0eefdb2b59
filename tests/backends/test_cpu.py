"""The `cpu` backend: what it finds, what it sets up, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrograd_hookspecs import BuildContext, ConfigError, QuantMatrix
from retrograd_plugins.backends import _cpu_host as host
from retrograd_plugins.backends import cpu
from retrograd_plugins.kernels.cpu._simd_features import VARIANTS, usable_features, usable_variants


def build(kernels: Any = "auto", threads: int | None = None) -> cpu.CpuBackend:
    config = SimpleNamespace(training=SimpleNamespace(threads=threads))
    return cpu.build(cpu.CpuConfig(kernels=kernels), BuildContext(config=config, base_dir=Path()))


def test_registers_one_backend_with_its_keys() -> None:
    [component] = cpu.retrograd_backends()
    assert (component.name, component.config) == ("cpu", cpu.CpuConfig)


def test_describes_the_device() -> None:
    backend = build(threads=1)
    device = backend.device
    assert device.backend == "cpu"
    assert device.threads == 1
    assert device.memory_bytes > 0
    assert device.features == usable_features()
    assert usable_variants()[0] in device.description
    assert backend.compute_dtype == np.float32
    assert backend.variants == usable_variants()


def test_threads_are_automatic_and_bounded() -> None:
    available = host.available_processors()
    assert 1 <= build().device.threads <= available
    with pytest.raises(ConfigError, match=rf"{available + 1} threads, .* may use {available} processors"):
        build(threads=available + 1)


@pytest.mark.parametrize("variant", usable_variants())
def test_a_variant_can_be_forced(variant: str) -> None:
    backend = build(variant)
    assert backend.variants == (variant,)
    assert f"{variant} kernels" in backend.device.description


def test_a_variant_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot run the 'amx' kernels \(one of avx2, portable"):
        cpu._variants("amx", ("avx2", "portable"))


def test_variants_follow_from_features(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd_plugins.kernels.cpu import _simd_features as features

    def variants(names: str, *, tiles: bool = True) -> tuple[str, ...]:
        monkeypatch.setattr(features, "target_features", lambda: frozenset(names.split()))
        monkeypatch.setattr(features, "tiles_permitted", lambda: tiles)
        monkeypatch.setattr(features, "jit_disabled", lambda: False)
        return features.usable_variants()

    full = "avx2 fma avx512f avx512bw avx512bf16 amx-tile amx-bf16"
    assert variants(full) == tuple(VARIANTS)
    assert variants(full, tiles=False) == ("avx512", "avx2", "portable")
    assert variants(full.replace("avx512bf16", "")) == ("avx512", "avx2", "portable")
    assert variants("avx2 fma") == ("avx2", "portable")
    assert variants("neon") == ("portable",)


def test_arrays_and_weights_stay_where_they_are() -> None:
    backend = build()
    array = np.ones((2, 3), np.float32)
    assert backend.from_host(array) is array
    assert backend.to_host(array) is array
    assert backend.empty((2, 3), np.int32).dtype == np.int32
    assert backend.from_host(array.T).flags.c_contiguous
    weight = QuantMatrix(name="w", format="F32", data=array.view(np.uint8), columns=3)
    assert backend.upload(weight) is weight


def test_shared_objects_are_made_once() -> None:
    backend = build()
    first = backend.shared("scratch", list)
    assert backend.shared("scratch", list) is first
    assert build().shared("scratch", list) is not first


def test_a_container_limits_processors_and_memory(tmp_path: Path) -> None:
    unlimited_processors, unlimited_memory = host.available_processors(tmp_path), host.free_memory(tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert host.available_processors(tmp_path) == unlimited_processors
    assert host.free_memory(tmp_path) > unlimited_memory // 2
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("5000\n")
    assert host.available_processors(tmp_path) == 1
    assert host.free_memory(tmp_path) == 4000


SETTLED = """
from pathlib import Path
from types import SimpleNamespace
import numpy as np, os, sys
from retrograd_hookspecs import BuildContext
from retrograd_plugins.backends import cpu
assert "numba" not in sys.modules
config = SimpleNamespace(training=SimpleNamespace(threads=1))
backend = cpu.build(cpu.CpuConfig(), BuildContext(config=config, base_dir=Path()))
import numba, threadpoolctl
@numba.njit(parallel=True)
def total(n):
    s = 0
    for i in numba.prange(n):
        s += i
    return s
total(10)
blas = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
print(numba.threading_layer(), numba.get_num_threads(), os.environ["OMP_WAIT_POLICY"], set(blas))
assert numba.threading_layer() in backend.device.description
"""


@pytest.mark.parametrize("layer", ["", "omp"])
def test_sets_up_the_thread_pool(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TBB where it is installed, else OpenMP; a layer that the user chose stays; BLAS has one thread."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("NUMBA_THREADING_LAYER", raising=False)
    if layer:
        monkeypatch.setenv("NUMBA_THREADING_LAYER", layer)
    result = subprocess.run([sys.executable, "-c", SETTLED], capture_output=True, text=True, check=True)
    chosen, threads, policy, blas = result.stdout.split()
    assert chosen in ({layer} if layer else {"tbb", "omp"})
    assert (threads, policy, blas) == ("1", "passive", "{1}")
