"""What the processor offers, asked before anything is compiled for it."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import llvmlite.binding as llvm
from numba import config

VARIANTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "amx": frozenset({"amx-tile", "amx-bf16", "avx512f", "avx512bw", "avx512bf16"}),
        "avx512": frozenset({"avx512f"}),
        "avx2": frozenset({"avx2", "fma"}),
        "portable": frozenset(),
    }
)
"""Features, as LLVM names them, that each variant of a kernel needs; the preferred variant first."""

TILE_VARIANTS = ("amx", "amx-bf16")
"""What the features of "amx" serve. The second is taken only if it is asked for."""

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def numba_setting(name: str) -> Any:
    """A setting of `numba.config`, whose attributes are made at run time."""
    return getattr(config, name)


def jit_disabled() -> bool:
    """True if NUMBA_DISABLE_JIT is set: kernels then run as plain Python."""
    return bool(numba_setting("DISABLE_JIT"))


def is_x86() -> bool:
    """True on a 64-bit x86 processor."""
    return platform.machine().lower() in {"x86_64", "amd64"}


def is_arm64() -> bool:
    """True on a 64-bit Arm processor."""
    return platform.machine().lower() in {"aarch64", "arm64"}


@functools.cache
def target_features() -> frozenset[str]:
    """Features that Numba compiles for: those of the host, or of NUMBA_CPU_FEATURES if that is set.

    An instruction that the target lacks makes LLVM abort the process, so both must be heeded.
    """
    host = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    if numba_setting("CPU_FEATURES") is None and numba_setting("CPU_NAME") is None:
        return host
    wanted = str(numba_setting("CPU_FEATURES") or "").split(",")
    return host & frozenset(name[1:] for name in wanted if name.startswith("+"))


@functools.cache
def tiles_permitted() -> bool:
    """Ask Linux for the AMX tile state of this process; True if granted.

    Without it the first tile instruction kills the process. Granted once, it holds for all threads.
    """
    if not sys.platform.startswith("linux") or not is_x86() or "amx-tile" not in target_features():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    request = [ctypes.c_long(v) for v in (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)]
    return int(libc.syscall(*request)) == 0


def usable_features() -> frozenset[str]:
    """Features that kernels may use: AMX only where the operating system grants it."""
    features = target_features()
    if tiles_permitted():
        return features
    return frozenset(name for name in features if not name.startswith("amx-"))


def usable_variants() -> tuple[str, ...]:
    """Variants that can run here, the preferred first. Only "portable" has a form without the JIT."""
    if jit_disabled():
        return ("portable",)
    features = usable_features()
    return tuple(name for name, needs in VARIANTS.items() if needs <= features)


def has_half_conversion() -> bool:
    """True if the processor converts float16 in hardware; else LLVM would call a missing function."""
    return "f16c" in target_features() or is_arm64()


def has_fused_multiply_add() -> bool:
    """True if a fused multiply-add is an instruction and not a slow call."""
    return "fma" in target_features() or is_arm64()
