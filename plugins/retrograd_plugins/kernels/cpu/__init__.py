"""Kernels of the `cpu` backend: Numba, compiled for the processor at hand.

Compiled code is kept in a directory named by a hash of the kernels' sources. Numba's own check sees a
changed file only for the functions in it, not for what they call in other files, and would run stale code
after an update.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import version
from pathlib import Path

from retrograd.cache import cache_dir


def _keep_compiled_code_by_sources() -> None:
    digest = hashlib.sha256(f"{version('numba')} {version('llvmlite')}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    given = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(given) if given else cache_dir() / "numba"
    if base.name.startswith("kernels-"):  # inherited from a process that did the same
        base = base.parent
    os.environ["NUMBA_CACHE_DIR"] = str(base / name)
    if "numba" in sys.modules:
        sys.modules["numba"].config.reload_config()


_keep_compiled_code_by_sources()
