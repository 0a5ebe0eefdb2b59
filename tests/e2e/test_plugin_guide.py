"""docs/writing-a-plugin.md is a working plugin: built, installed, tested and used as the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from retrograd_hookspecs import KINDS, LifecycleHooks, SelectionHooks
from tests.contrib import pip_install

from .support import Workspace, retrograd

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-plugin.md"
FILES = ("pyproject.toml", "retrograd_optimizer_signum.py", "test_signum.py")


def block_after(text: str, start: str) -> str:
    """The first code block after `start`."""
    match = re.search(r"```\w*\n(.*?)^```", text[text.index(start) + len(start) :], re.DOTALL | re.MULTILINE)
    assert match is not None, start
    return match[1]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page has its reader write."""
    folder = tmp_path_factory.mktemp("guide") / "retrograd-optimizer-signum"
    folder.mkdir()
    text = GUIDE.read_text(encoding="utf-8")
    for name in FILES:
        (folder / name).write_text(block_after(text, f"`{name}`:"), encoding="utf-8")
    listed = set(re.findall(r"^  (\S+)$", block_after(text, "## 1. Three files"), re.MULTILINE))
    assert listed == set(FILES)
    return folder


@pytest.fixture(scope="module")
def site(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it is installed in."""
    return pip_install(project, tmp_path_factory.mktemp("signum"))


def test_its_own_test_passes(project: Path, site: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_it_trains(workspace: Workspace, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    rows = json.loads(retrograd("plugins", "list", "--kind", "optimizers", "--json").out)
    assert {"signum", "adamw"} <= {row["name"] for row in rows}
    path = workspace.toml(evaluation={"data": "heldout.jsonl"}, training={"lr": None})
    # The tables of the page, as they stand there, laid over a small run.
    shown = block_after(GUIDE.read_text(), "retrograd plugins list --kind optimizers\n```")
    text = path.read_text()
    text = text.replace("[training]\n", shown.partition("\n[optimizer")[0] + "\n")
    path.write_text(text + "\n[optimizer" + shown.partition("\n[optimizer")[2])
    retrograd("train", path, "--set", "training.lr=2e-3")
    assert workspace.held_out()[-1] < 0.8 * workspace.held_out()[0]
    assert "[optimizer.signum]\nmomentum = 0.95" in (workspace / "out" / "adapter.resolved.toml").read_text()
    found = retrograd("check", path, "--set", "optimizer.signum.momentum=1.5", code=2)
    assert "optimizer.signum.momentum: must be at least 0 and below 1, got 1.5" in found.err
    assert "signum" in json.loads(retrograd("config-schema").out)["properties"]["optimizer"]["properties"]


def test_the_local_hook_file(workspace: Workspace) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    hooks = block_after(text, 'load = ["my_hooks.py"]\n```').replace("< 0.1", "< 100")
    (workspace / "my_hooks.py").write_text(hooks)
    found = retrograd("train", workspace.toml(plugins={"load": ["my_hooks.py"]}))
    assert found.out.startswith("step 1 is below")


def test_the_page_names_what_exists() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for group, hook in re.findall(r"\| `(retrograd\.\w+)` \| `(retrograd_\w+)` \|", text):
        [kind] = [kind for kind in KINDS.values() if kind.group == group]
        assert kind.hook == hook
    known = {kind.hook for kind in KINDS.values()} | {*vars(LifecycleHooks), *vars(SelectionHooks)}
    used = set(re.findall(r"def (retrograd_\w+)\(", text))
    assert used
    assert used <= known
