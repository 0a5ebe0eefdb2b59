"""Contrib distributions, built and installed as a user would, into folders of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CONTRIB = Path(__file__).resolve().parents[2] / "contrib"


def install(distribution: str, target: Path) -> Path:
    """`pip install` a contrib distribution into a folder; returns the folder for sys.path."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--target", str(target), str(CONTRIB / distribution)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return target


@pytest.fixture(scope="session")
def extras_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("retrograd-extras", tmp_path_factory.mktemp("extras"))


@pytest.fixture(scope="session")
def broken_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("retrograd-broken", tmp_path_factory.mktemp("broken"))


@pytest.fixture
def extras(extras_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working third-party distribution is installed."""
    monkeypatch.syspath_prepend(str(extras_site))


@pytest.fixture
def broken(broken_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution of mistakes is installed."""
    monkeypatch.syspath_prepend(str(broken_site))


@pytest.fixture
def session() -> Callable[..., object]:
    """A new plugin session over what is installed now."""
    from retrograd.plugins import Catalogue, PluginSession

    def make(disable: tuple[str, ...] = ()) -> PluginSession:
        return PluginSession(Catalogue.installed(disable))

    return make
