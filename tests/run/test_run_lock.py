"""Two runs at once never share a result or a checkpoint directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.run_lock import check_unused, sole_run
from retrograd_hookspecs import ConfigError


def test_one_run_at_a_time(tmp_path: Path) -> None:
    output, other = tmp_path / "out" / "a.gguf", tmp_path / "out" / "b.gguf"
    checkpoints = tmp_path / "checkpoints"
    check_unused(output, checkpoints)
    with sole_run(output, checkpoints):
        for taken in (check_unused, lambda *places: sole_run(*places).__enter__()):
            with pytest.raises(ConfigError, match=r"output\.path: another run writes .*a\.gguf now"):
                taken(output, None)
            with pytest.raises(ConfigError, match=r"checkpoint\.directory: another run writes .*checkpoints"):
                taken(other, checkpoints)
        check_unused(other, None)
        with sole_run(other, tmp_path / "others"):
            pass
    check_unused(output, checkpoints)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    """The file of the lock may stay; what counts is the process."""
    program = (
        "import os, sys; from pathlib import Path; from retrograd.run_lock import sole_run\n"
        "with sole_run(Path(sys.argv[1]), None): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "a.gguf"], check=True)
    assert (tmp_path / ".a.gguf.lock").exists()
    with sole_run(tmp_path / "a.gguf", None):
        pass
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_the_writer_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with sole_run(tmp_path / "file" / "a.gguf", tmp_path / "file" / "checkpoints"):
        pass
