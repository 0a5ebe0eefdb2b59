"""What the host grants a run, and Numba's thread pool set up to suit it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil

CGROUP = Path("/sys/fs/cgroup")


def _cgroup_value(name: str, root: Path) -> str:
    try:
        return (root / name).read_text().strip()
    except OSError:
        return ""


def available_processors(root: Path = CGROUP) -> int:
    """Processors this process may use at once: its affinity, or less under a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _cgroup_value("cpu.max", root).partition(" ")
    if quota.isdigit() and period.isdigit():
        count = min(count, max(1, int(quota) // int(period)))
    return count


def default_threads() -> int:
    """One thread a physical core: a second one on a core shares its vector units and gains nothing."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return max(1, min(available_processors(), cores))


def free_memory(root: Path = CGROUP) -> int:
    """Bytes of memory that can be had without swapping, under a container's limit if there is one."""
    free = int(psutil.virtual_memory().available)
    limit, used = _cgroup_value("memory.max", root), _cgroup_value("memory.current", root)
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def processor_name() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # Not Linux: the platform module knows what there is to know.
    return platform.processor() or platform.machine()


def prepare_environment() -> None:
    """Settings that libraries read when they are loaded; call it before Numba is imported.

    GNU OpenMP spins while it waits, which on a loaded machine makes a parallel region a thousand times
    slower; passive waiting costs microseconds.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def choose_threading_layer() -> str:
    """Select Numba's threading layer, unless the user or an earlier run has, and return its name.

    TBB if it loads, else OpenMP. Numba's own `workqueue` aborts the process when two Python threads
    enter it, so it is taken only where nothing else is installed.
    """
    import numba

    library: Any = numba  # Numba's type hints do not name what is needed here.
    settings = library.config
    try:
        return str(library.threading_layer())
    except ValueError:
        pass  # No parallel function has run yet, so the choice is still open.
    if settings.THREADING_LAYER == "default":
        settings.THREADING_LAYER = next((name for name in ("tbb", "omp") if _layer_loads(name)), "workqueue")
    return str(settings.THREADING_LAYER)


def _layer_loads(name: str) -> bool:
    if name == "tbb":
        _preload_tbb()
    try:
        __import__(f"numba.np.ufunc.{name}pool")
    except ImportError:
        return False
    return True


def _preload_tbb() -> None:
    """Load the TBB that pip installed: it lies in the environment's `lib`, where no loader looks."""
    names = {"darwin": "libtbb.12.dylib", "win32": "tbb12.dll"}
    folder = Path(sys.prefix) / ("Library/bin" if sys.platform == "win32" else "lib")
    path = folder / names.get(sys.platform, "libtbb.so.12")
    if path.is_file():
        try:
            ctypes.CDLL(str(path), mode=getattr(ctypes, "RTLD_GLOBAL", 0))
        except OSError:
            return  # A TBB for another platform; importing the pool decides what is used instead.


def limit_blas() -> None:
    """Give every BLAS of this process one thread.

    One with threads of its own competes with Numba's for the processors, which makes both three times
    slower. Numba loads SciPy's BLAS, if there is one, with the first function it compiles; it is loaded here
    so that the limit reaches it.
    """
    from threadpoolctl import threadpool_limits

    with contextlib.suppress(ImportError):
        importlib.import_module("scipy.linalg.cython_blas")
    threadpool_limits(limits=1, user_api="blas")
