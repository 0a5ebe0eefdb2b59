"""Metrics elsewhere than in `metrics.jsonl`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.sinks.test_tensorboard import scalars

from .support import Workspace, retrograd


def test_tensorboard_holds_what_metrics_hold(workspace: Workspace) -> None:
    checkpoint = {"directory": "checkpoints", "mode": "steps", "every_steps": 4}
    path = workspace.toml(
        metrics={"tensorboard_dir": "board"}, evaluation={"data": "heldout.jsonl"}, checkpoint=checkpoint
    )
    retrograd("train", path)
    expected = {
        (record["step"], name): value
        for record in workspace.metrics()
        for name, value in record.items()
        if name not in ("step", "time")
    }
    found = {(step, name): value for step, name, value in scalars(workspace / "board")}
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_missing_extra_is_refused_with_its_pip_line(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    path = workspace.toml(metrics={"wandb_export_dir": "export"})
    for command in ("check", "train"):
        found = retrograd(command, path, code=2)
        text = "\n".join(found.errors)
        assert "run.toml:" in text
        assert "metrics.wandb_export_dir" in text
        assert "pip install 'retrograd[wandb]'" in text
