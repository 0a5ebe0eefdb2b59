"""Distributions that tests install as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONTRIB = Path(__file__).resolve().parents[1] / "contrib"


def pip_install(project: Path, target: Path) -> Path:
    """`pip install` the project in a folder into `target`; returns `target`, for sys.path.

    Without dependencies and build isolation: retrograd and hatchling are what the tests run with.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--target", str(target), str(project)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return target
