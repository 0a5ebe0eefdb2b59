"""The examples and the quickstart: their files are right, whatever the model."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest

from retrograd.installed import installed_schema
from retrograd_plugins.commands.quickstart import write_files

from .support import Workspace, retrograd, write_jsonl

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ("warm-start", "agent-calculator", "agent-fix-tests")
"""They need adapters, traces or containers first: `test_agent_examples.py` and its neighbour check them."""
FILES = sorted(p for p in (ROOT / "examples").rglob("*.toml") if p.parent.name not in AGENTS)


def test_there_is_an_example_of_each_data_format() -> None:
    assert {path.name for path in FILES} >= {"sft-chat.toml", "sft-tools.toml", "sft-text.toml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_example(workspace: Workspace, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in an activated environment: `python` of a reward_command is the one that has retrograd.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert (path.parent / "README.md").is_file()
    jsonschema.validate(tomllib.loads(path.read_text()), installed_schema(), jsonschema.Draft7Validator)
    folder = shutil.copytree(path.parent, workspace / "example")
    # The tiny model writes more tokens for the same text, so that it needs a longer context.
    short = ["--set", "training.ctx=4096", "--set", "training.micro_batch=1024"]
    options = ["--model", workspace.model, "--device", "cpu", *short]
    found = retrograd("check", folder / path.name, *options)
    assert "configuration: no problems" in found.out
    assert "error" not in found.out


def test_quickstart(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace.directory)
    write_files(workspace / "try")
    # A few of its records, so that the test takes seconds.
    for name, count in (("train.jsonl", 6), ("heldout.jsonl", 4)):
        records = [json.loads(line) for line in (workspace / "try" / name).read_text().splitlines()]
        write_jsonl(workspace / "try" / name, records[:count])
    found = retrograd("quickstart", "try", "--model", workspace.model, "--device", "cpu")
    assert "wrote" not in found.out  # the files were there, and are used as they are
    assert found.out.count("  before:  ") == found.out.count("  after:   ") == 4
    assert "held-out before: loss" in found.out
    assert "Talk to it: retrograd chat try/quickstart.toml --compare" in found.out
    assert (workspace / "try" / "tickets.gguf").exists()
    found = retrograd(
        "chat", "try/quickstart.toml", "--model", workspace.model, "--device", "cpu", "--compare",
        "--max-new-tokens", 4, stdin="hello\n",
    )  # fmt: skip
    assert found.out.startswith("base: ")


def test_quickstart_writes_its_files(tmp_path: Path) -> None:
    written = write_files(tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["heldout.jsonl", "quickstart.toml", "train.jsonl"]
    assert write_files(tmp_path / "new" / "folder") == []
    schema = installed_schema()
    jsonschema.validate(tomllib.loads(written[1].read_text()), schema, jsonschema.Draft7Validator)
