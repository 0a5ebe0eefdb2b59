"""What the machine itself can do: read bandwidth and matrix products; prints one JSON line.

The orchestrator starts it without a forced OpenBLAS core type, which would slow NumPy down.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import PeakMemory, emit, time_steps

MIN_ARRAY_BYTES = 512 << 20
MAX_ARRAY_BYTES = 2 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("bandwidth", "gemm"), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--size", type=int, default=2048)
    for name in ("threads", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    a = parser.parse_args()
    if a.kind == "bandwidth":
        bandwidth(a.threads, a.steps, a.warmup)
    elif a.dtype == "float32":
        numpy_gemm(a.size, a.steps, a.warmup)
    else:
        torch_gemm(a.size, a.threads, a.steps, a.warmup)


def bandwidth(threads: int, steps: int, warmup: int) -> None:
    """Sum an array that no cache holds, a contiguous part a thread; GB/s."""
    import numba
    import numpy as np

    memory = PeakMemory()
    numba.set_num_threads(min(threads, numba.get_num_threads()))

    @numba.njit(parallel=True)  # type: ignore[untyped-decorator, unused-ignore]
    def total(array: Any, parts: int) -> Any:
        sums = np.zeros(parts * 8, np.int64)  # 64 bytes apart: a cache line each
        length = len(array) // parts
        for part in numba.prange(parts):
            # Several accumulators, so that loads and not additions are the limit.
            sums[part * 8] = array[part * length : (part + 1) * length].sum()
        return sums.sum()

    array = np.ones(array_bytes() // 8, np.int64)
    if total(array, threads) != len(array) // threads * threads:
        raise AssertionError("the sum of ones is wrong")
    seconds = time_steps(lambda: total(array, threads), warmup=warmup, steps=max(steps, 5))
    emit(
        seconds=seconds,
        work=array.nbytes / 1e9,
        memory=memory,
        versions=("numpy", "numba"),
        bytes=array.nbytes,
    )


def array_bytes(cache: Path = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")) -> int:
    """Twice the last-level cache, at least 512 MB, at most 2 GB."""
    size = 0
    if cache.is_file() and (match := re.fullmatch(r"(\d+)([KM])", cache.read_text().strip())):
        size = int(match[1]) << (10 if match[2] == "K" else 20)
    return min(max(2 * size, MIN_ARRAY_BYTES), MAX_ARRAY_BYTES)


def numpy_gemm(size: int, steps: int, warmup: int) -> None:
    """NumPy's BLAS in float32; GFLOP/s."""
    import numpy as np

    memory = PeakMemory()
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)
    _gemm(lambda: np.matmul(a, b, out=out), size, steps, warmup, memory, ("numpy",))


def torch_gemm(size: int, threads: int, steps: int, warmup: int) -> None:
    """PyTorch's oneDNN in bfloat16; GFLOP/s."""
    import torch

    memory = PeakMemory()
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    _gemm(lambda: torch.mm(a, b, out=out), size, steps, warmup, memory, ("torch",))


def _gemm(
    multiply: Callable[[], object],
    size: int,
    steps: int,
    warmup: int,
    memory: PeakMemory,
    versions: tuple[str, ...],
) -> None:
    seconds = time_steps(multiply, warmup=warmup, steps=max(steps, 5))
    emit(seconds=seconds, work=2 * size**3 / 1e9, memory=memory, versions=versions)


if __name__ == "__main__":
    main()
