"""docs/agents.md: its configurations are valid, its Python builds, its metrics and links exist."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from retrograd import AgenticGRPOConfig
from retrograd.agent.scenarios import scenario_of
from retrograd.agent.stage import agent_metrics
from retrograd.installed import installed_schema

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("text", blocks("toml"))
def test_every_configuration_is_valid(text: str) -> None:
    values: dict[str, Any] = tomllib.loads(text)
    if "run" not in values:  # a part of a run
        values |= {
            "run": {"algorithm": "agent_grpo"},
            "model": {"path": "m.gguf"},
            "output": {"path": "a.gguf"},
        }
        values["training"] = {}
        values["agent"]["scenarios"] = "scenarios.jsonl"
    jsonschema.validate(values, installed_schema(), jsonschema.Draft7Validator)


def test_scenarios() -> None:
    for text in blocks("json"):
        for line in text.splitlines():
            scenario_of(json.loads(line))


def test_the_run_in_python() -> None:
    [text] = blocks("python")
    tree = ast.parse(text)
    # All but the run itself, which loads a model and asks a judge.
    tree.body = [node for node in tree.body if not isinstance(node, ast.With)]
    names: dict[str, Any] = {}
    exec(compile(tree, str(PAGE), "exec"), names)
    assert isinstance(names["config"], AgenticGRPOConfig)
    assert names["config"].mcp_servers[0].command == ("python3", "calculator_server.py")


def test_metrics_are_those_of_a_run() -> None:
    named = set(re.findall(r"`(agent/\w+)`", PAGE.read_text()))
    of_the_algorithm = {"agent/dropped_fraction", "agent/unscored_fraction"}
    shown = agent_metrics([], wall_seconds=1.0, generation_seconds=0.0, constrained=True)
    assert named == of_the_algorithm | set(shown)


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE.read_text()):
        assert link.startswith("https://") or (PAGE.parent / link).is_file(), link
