"""What `pip install` would put into site-packages."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from retrograd.observe.viewer import SCRIPTS

from .entry_points import ROOT, modules_on_disk


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    [path] = out.glob("*.whl")
    return path


def test_three_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "retrograd",
        "retrograd_hookspecs",
        "retrograd_plugins",
    }
    assert not [name for name in names if name.endswith((".pyc", ".nbi", ".nbc"))]
    for package in ("retrograd", "retrograd_hookspecs", "retrograd_plugins"):
        assert f"{package}/py.typed" in names


def test_the_quickstart_has_its_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for file in ("quickstart.toml", "train.jsonl", "heldout.jsonl"):
        assert f"retrograd_plugins/quickstart_data/{file}" in names


def test_the_page_of_a_recorded_run_has_its_sources(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for file in ("page.html", "style.css", *SCRIPTS):
        assert f"retrograd/observe/viewer/{file}" in names


def test_entry_points_name_modules_of_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    [table] = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
    parser = ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(archive.read(table).decode())
    for group, modules in modules_on_disk().items():
        assert dict(parser[group]) == modules
        for module in modules.values():
            assert f"{module.replace('.', '/')}.py" in names
