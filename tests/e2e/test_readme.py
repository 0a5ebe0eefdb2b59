"""The TOMLs and the reward of the README do what it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from retrograd.installed import installed_schema

from .support import Workspace, retrograd, write_jsonl

README = Path(__file__).resolve().parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("text", blocks("toml"), ids=lambda text: tomllib.loads(text)["run"]["algorithm"])
def test_every_configuration_is_valid(text: str) -> None:
    values: dict[str, Any] = tomllib.loads(text)
    values.setdefault("model", {"path": "model.gguf"})
    values.setdefault("output", {"path": "adapter.gguf"})
    values.setdefault("training", {})
    jsonschema.validate(values, installed_schema(), jsonschema.Draft7Validator)


def test_the_run_that_learns_from_a_reward(workspace: Workspace) -> None:
    [text] = [block for block in blocks("toml") if 'algorithm = "grpo"' in block]
    [reward] = [block for block in blocks("python") if "def score(" in block]
    (workspace / "reward.py").write_text(reward)
    prompts = [{"messages": [{"role": "user", "content": f"say {n}"}]} for n in range(4)]
    write_jsonl(workspace / "prompts.jsonl", prompts)
    more = (
        f'[model]\npath = "{workspace.model}"\ndevice = "{workspace.device}"\n'
        '[output]\npath = "out/adapter.gguf"\n[lora]\nrank = 4\n[training]\nctx = 128\nmicro_batch = 128\n'
    )
    (workspace / "run.toml").write_text(text + more)
    short = ["--set", "grpo.updates=1", "--set", "grpo.sampling.max_new_tokens=8", "--set"]
    retrograd("check", workspace / "run.toml", *short, "grpo.group_size=2")
    assert (workspace / "reward.py").exists()
