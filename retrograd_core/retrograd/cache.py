"""Where downloaded models and computed fingerprints are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache directory of retrograd; it may not exist yet and may be deleted at any time.

    RETROGRAD_CACHE_DIR if set, else `retrograd` under XDG_CACHE_HOME or `~/.cache`.
    """
    chosen = os.environ.get("RETROGRAD_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "retrograd"
