"""The shape of the project: one table of entry points, dependencies in one direction, a fast start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomlkit

from retrograd.config.reference import sections_in
from retrograd.installed import installed_classes
from retrograd.parts import factories
from retrograd.plugins import Catalogue, PluginSession

from .entry_points import ROOT, modules_on_disk
from .reference import DOCUMENT, current

SOURCES = {
    "retrograd_hookspecs": ROOT / "hookspecs" / "retrograd_hookspecs",
    "retrograd": ROOT / "retrograd_core" / "retrograd",
    "retrograd_plugins": ROOT / "plugins" / "retrograd_plugins",
}
ALLOWED = {
    "retrograd_hookspecs": set(),
    "retrograd": {"retrograd_hookspecs"},
    "retrograd_plugins": {"retrograd_hookspecs", "retrograd"},
}
HEAVY = {"numba", "llvmlite", "docker", "mcp", "torch", "gguf"}


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """First parts of the absolute imports of a file; `top_level` leaves out those inside functions."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    skipped: set[ast.AST] = set()
    if top_level:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node):
                skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_entry_points_equal_the_modules_on_disk() -> None:
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text()).unwrap()["project"]
    assert project["entry-points"] == modules_on_disk()


@pytest.mark.parametrize("package", SOURCES)
def test_dependencies_point_one_way(package: str) -> None:
    for path in SOURCES[package].rglob("*.py"):
        if path == SOURCES["retrograd"] / "__init__.py":  # the facade's lazy table
            continue
        crossed = imports(path) & (set(SOURCES) - ALLOWED[package] - {package})
        assert not crossed, f"{path.relative_to(ROOT)} imports {crossed}"


def test_contrib_imports_the_public_packages_only() -> None:
    for path in (ROOT / "contrib").rglob("*.py"):
        assert "retrograd_plugins" not in imports(path), path


def test_registering_modules_import_nothing_heavy() -> None:
    for modules in modules_on_disk().values():
        for module in modules.values():
            path = ROOT / "plugins" / Path(*module.split(".")).with_suffix(".py")
            crossed = imports(path, top_level=True) & HEAVY
            assert not crossed, f"{module} imports {crossed} at its top"


def test_importing_every_registering_module_stays_light() -> None:
    modules = [m for group in modules_on_disk().values() for m in group.values()]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules) & {HEAVY!r}))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_is_fast() -> None:
    """Under 0.6 s of CPU, the best of five: it takes 0.25 s on a quiet machine, twice that on a busy one, and
    NumPy or Numba alone would add more."""
    code = (
        "import resource, subprocess, sys\n"
        "r = subprocess.run([sys.executable, '-m', 'retrograd', '--help'], capture_output=True, check=True)\n"
        "u = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(u.ru_utime + u.ru_stime)\n"
    )
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(runs) < 0.6, runs


def test_the_guide_lists_every_part_of_a_run() -> None:
    """The services that `needs` of a component may name."""
    text = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    listed = re.findall(r"`(\w+)`", text[text.index("There are: ") :].split("\n- ", 1)[0])
    assert set(listed) == {*factories(SimpleNamespace(config=None, session=None)), "total_steps"}


def test_importing_retrograd_loads_no_engine() -> None:
    code = f"import sys, retrograd; print(sorted(set(sys.modules) & {HEAVY | {'numpy', 'click'}!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_configuration_reference_is_current() -> None:
    """`python -m tests.architecture.reference` writes it anew."""
    text = DOCUMENT.read_text()
    assert current(text) == text
    session = PluginSession(Catalogue.installed())
    built_in = {
        name
        for name, cls in installed_classes(session).items()
        if cls.__module__.startswith("retrograd_plugins")
    }
    assert built_in <= set(sections_in(text))
