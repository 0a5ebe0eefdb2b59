"""Third-party distributions, installed with pip: they work without a change here, and mistakes are named."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from .support import Workspace, hook_file, killed, retrograd, retrograd_process

TABLES: Mapping[str, Any] = {
    "training": {"optimizer": "lion", "lr": 1e-3},
    "optimizer": {"lion": {"beta1": 0.95}},
    "sft": {"loss": "focal"},
    "loss": {"focal": {"gamma": 1.5}},
    "metrics": {"sinks": ["csv"]},
    "sink": {"csv": {"path": "metrics.csv"}},
    "evaluation": {"data": "heldout.jsonl"},
    "checkpoint": {"directory": "checkpoints", "mode": "steps", "every_steps": 4},
}


def rows(path: Path) -> list[tuple[int, str, float]]:
    """Rows of the CSV sink without times, which differ from run to run."""
    with path.open(newline="") as file:
        table = [(int(step), name, float(value)) for step, name, value in csv.reader(file)]
    return [row for row in table if not row[1].startswith(("timing/", "system/"))]


def test_a_run_of_foreign_parts(workspace: Workspace, extras: None) -> None:
    path = workspace.toml(**TABLES)
    retrograd("train", path)
    losses = workspace.held_out()
    assert losses[-1] < 0.8 * losses[0]
    resolved = (workspace / "out" / "adapter.resolved.toml").read_text()
    assert "# retrograd-extras 0.1.0" in resolved
    assert "[optimizer.lion]\nbeta1 = 0.95\nbeta2 = 0.99" in resolved
    assert "[loss.focal]\ngamma = 1.5" in resolved
    steps = {step: value for step, name, value in rows(workspace / "metrics.csv") if name == "train/loss"}
    assert steps == workspace.losses()
    whole = workspace.adapter
    # The resolved file repeats the run, foreign parts included.
    retrograd("train", workspace / "out" / "adapter.resolved.toml")
    assert workspace.adapter == whole


def test_gamma_zero_is_cross_entropy(workspace: Workspace, extras: None) -> None:
    retrograd("train", workspace.toml(sft={"loss": "focal"}, loss={"focal": {"gamma": 0.0}}))
    focal = workspace.losses()
    retrograd("train", workspace.toml())
    assert focal == pytest.approx(workspace.losses(), rel=1e-6)


def test_a_killed_run_of_foreign_parts_resumes(workspace: Workspace, extras: None, extras_site: Path) -> None:
    retrograd("train", workspace.toml(**TABLES))
    whole, expected = workspace.adapter, rows(workspace / "metrics.csv")
    for name in ("out", "checkpoints", "metrics.csv"):
        os.rename(workspace / name, workspace / f"whole-{name}")
    hook_file(
        workspace / "kill.py",
        "@hookimpl\ndef retrograd_step_finished(run, report):\n"
        f"    marker = Path({str(workspace / 'killed')!r})\n"
        "    if report.step == 6 and not marker.exists():\n"
        "        marker.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    path = workspace.toml(**TABLES, plugins={"load": ["kill.py"]})
    outcome = retrograd_process("train", path, code=None, environment={"PYTHONPATH": str(extras_site)})
    assert killed(outcome), outcome
    assert rows(workspace / "metrics.csv")[-1][0] == 6
    retrograd("train", path, "--resume")
    assert workspace.adapter == whole
    assert rows(workspace / "metrics.csv") == expected


def test_their_keys_are_checked_and_in_the_schema(workspace: Workspace, extras: None) -> None:
    path = workspace.toml(
        **{
            **TABLES,
            "optimizer": {"lion": {"beta_1": 0.9}},
            "loss": {"focal": {"gamma": -1.0}},
            "sink": {"csv": {}},
        }
    )
    found = retrograd("check", path, code=2)
    text = "\n".join(found.errors)
    assert "error: 3 problems" in text
    assert "optimizer.lion.beta_1: unknown key (did you mean beta1?)" in text
    assert "loss.focal.gamma: must be at least 0, got -1.0" in text
    assert "sink.csv.path: required key is missing" in text
    schema = json.loads(retrograd("config-schema").out)
    tables = schema["properties"]
    assert set(tables["optimizer"]["properties"]["lion"]["properties"]) == {"beta1", "beta2"}
    assert tables["loss"]["properties"]["focal"]["properties"]["gamma"]["minimum"] == 0
    assert "path" in tables["sink"]["properties"]["csv"]["properties"]
    assert "lion" in json.dumps(tables["training"]["properties"]["optimizer"])
    listed = json.loads(retrograd("plugins", "list", "--json").out)
    extra = {(r["kind"], r["name"]) for r in listed if r["distribution"] == "retrograd-extras"}
    assert extra == {
        ("architectures", "gemma2"),
        ("losses", "focal"),
        ("losses", "sapo"),
        ("optimizers", "lion"),
        ("rewards", "exact_match"),
        ("sinks", "csv"),
    }


def test_without_the_distribution_the_message_says_how_to_get_it(workspace: Workspace) -> None:
    found = retrograd("check", workspace.toml(**TABLES), code=2)
    text = "\n".join(found.errors)
    assert "training.optimizer: no optimizer 'lion' is installed" in text
    assert "pip install retrograd-optimizer-lion" in text
    assert "sft.loss: no loss 'focal' is installed" in text
    assert "metrics.sinks: no sink 'csv' is installed" in text


def test_disabled_distribution(workspace: Workspace, extras: None) -> None:
    path = workspace.toml(training={"optimizer": "lion"}, plugins={"disable": ["retrograd-extras"]})
    found = retrograd("check", path, code=2)
    assert "no optimizer 'lion' is installed" in "\n".join(found.errors)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            {"training": {"optimizer": "raises_on_import"}},
            ["training.optimizer: retrograd-broken 0.0.1", "failed to import: RuntimeError"],
        ),
        (
            {"training": {"optimizer": "misnamed"}},
            ["training.optimizer: retrograd-broken 0.0.1", "registers no component called 'misnamed'"],
        ),
        (
            {"sft": {"loss": "wrong_type"}},
            ["sft.loss: retrograd-broken", "must return a list of retrograd_hookspecs.Component, got dict"],
        ),
        ({"sft": {"loss": "raises_in_hook"}}, ["sft.loss: retrograd-broken", "raised KeyError"]),
        (
            {"metrics": {"sinks": ["needs_a_package"]}},
            ["metrics.sinks: retrograd-broken", "`pip install a_package_that_does_not_exist`"],
        ),
        (
            {"metrics": {"sinks": ["misspelt_hook"]}},
            ["metrics.sinks: retrograd-broken", "did you mean 'retrograd_step_finished'?"],
        ),
        (
            {},
            ["training.optimizer: the optimizer 'adamw' is offered by retrograd 0.1.0 and retrograd-broken"],
        ),
    ],
)
def test_a_broken_plugin_is_named_at_the_key_that_asks_for_it(
    workspace: Workspace, broken: None, tables: dict[str, Any], words: list[str]
) -> None:
    path = workspace.toml(**tables)
    for command in ("check", "train"):
        found = retrograd(command, path, code=2)
        text = "\n".join(found.errors)
        for word in (*words, "run.toml"):
            assert word in text
        assert "This is a fault in retrograd" not in found.err


def test_a_broken_distribution_that_is_not_used_harms_nothing(workspace: Workspace, broken: None) -> None:
    path = workspace.toml(plugins={"disable": ["optimizers.adamw"]}, training={"optimizer": "sgd"})
    retrograd("train", path)
    path = workspace.toml(plugins={"disable": ["retrograd-broken"]})
    retrograd("train", path)
    assert "raises_on_import" in retrograd("plugins", "list").out
