"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import psutil

FEATURES = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "asimd", "sve")


def describe_machine() -> dict[str, Any]:
    """Processor, instruction sets, cores, memory, system and load. No host name, no paths."""
    flags = set(re.findall(r"\w+", _cpuinfo_line(r"(?:flags|Features)")))
    return {
        "processor": _cpuinfo_line("model name") or platform.processor() or platform.machine(),
        "features": [name for name in FEATURES if name in flags],
        "cores": psutil.cpu_count(logical=False) or 0,
        "logical_processors": os.cpu_count() or 0,
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def available_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpuinfo_line(name: str) -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.is_file() else ""
    match = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
