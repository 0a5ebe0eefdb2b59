"""Mistakes in the configuration and the prompts of algorithms that learn from rewards: exit code 2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .support import SMALL, Rollouts

JUDGE = {"type": "ruler", "base_url": "http://127.0.0.1:1/v1", "model": "m"}


def refused(rollouts: Rollouts, path: Path, *words: str, command: str = "train") -> None:
    """The command exits with 2 and says all of it."""
    text = "\n".join(rollouts.command(command, path, code=2).errors)
    for word in words:
        assert word in text, text
    assert not (rollouts / "out" / "adapter.gguf").exists()


GRPO_MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "temperature": (
        {"sampling": {"temperature": 0.7}},
        ["grpo.sampling.temperature: must be 1.0, got 0.7", "the model's own distribution"],
    ),
    "top_p": ({"sampling": {"top_p": 0.9}}, ["grpo.sampling.top_p: must be 1.0, got 0.9"]),
    "clip order": (
        {"clip_range_low": 0.3, "clip_range_high": 0.2},
        ["grpo.clip_range_high: must be at least clip_range_low = 0.3, got 0.2"],
    ),
    "clip bounds": ({"clip_range_low": 1.0}, ["grpo.clip_range_low: must be above 0 and below 1, got 1"]),
    "group of one": ({"group_size": 1}, ["grpo.group_size: must be at least 2 and at most 256, got 1"]),
    "group of many": ({"group_size": 257}, ["grpo.group_size: must be at least 2 and at most 256, got 257"]),
    "judge weight": ({"judge": JUDGE}, ["grpo.judge_weight: required with a judge"]),
    "no judge": (
        {"judge_weight": 1.0, "judge_failure": "fail", "max_judge_dropped_fraction": 0.1},
        [
            "grpo.judge_weight: has no effect without [grpo.judge]",
            "grpo.judge_failure: has no effect without [grpo.judge]",
            "grpo.max_judge_dropped_fraction: has no effect without [grpo.judge]",
        ],
    ),
    "judge failure": (
        {"judge": JUDGE, "judge_weight": 1.0, "judge_failure": "skip"},
        ['grpo.judge_failure: must be "drop_group" or "fail", got "skip"'],
    ),
    "judge drops": (
        {"judge": JUDGE, "judge_weight": 1.0, "judge_failure": "fail", "max_judge_dropped_fraction": 0.1},
        ['grpo.max_judge_dropped_fraction: has no effect with judge_failure = "fail"'],
    ),
    "criteria for pairs": (
        {"judge": {**JUDGE, "pairwise_rubric": "the shorter one"}, "judge_weight": 1.0},
        ['grpo.judge.pairwise_rubric: has no effect with strategy.mode = "auto"'],
    ),
    "judge type": (
        {"judge": {"type": "rular"}, "judge_weight": 1.0},
        ["grpo.judge.type", "rular", "ruler"],
    ),
    "judge keys": (
        {"judge": {**JUDGE, "rubrik": "x"}, "judge_weight": 1.0},
        ["grpo.judge.rubrik: unknown key (did you mean rubric?)"],
    ),
    "no reward": (
        {"reward": None},
        ["grpo.reward_command: required key is missing: nothing"],
    ),
    "two rewards": ({"reward_command": ["python", "r.py"]}, ["grpo.reward", "reward_command"]),
    "empty command": (
        {"reward": None, "reward_command": []},
        ["grpo.reward_command: is empty (name a program and its arguments)"],
    ),
    "no program": ({"reward": None, "reward_command": ["no-such-program"]}, ["no program 'no-such-program'"]),
    "keys of programs": (
        {"reward_mode": "oneshot", "reward_timeout_seconds": 3},
        [
            "grpo.reward_mode: has no effect with reward = 'python:./reward.py:score'",
            "grpo.reward_timeout_seconds: has no effect with reward",
        ],
    ),
    "reward file": ({"reward": "python:./rewards.py:score"}, ["there is no file", "rewards.py", "reward.py"]),
    "reward function": ({"reward": "python:./reward.py:scor"}, ["has no 'scor'", "did you mean"]),
    "reward name": ({"reward": "exact"}, ["grpo.reward", "exact"]),
    "kl schedule": (
        {"kl_schedule": {"warmup_updates": 2}},
        ["grpo.kl_schedule: needs kl_coefficient > 0"],
    ),
    "kl target": (
        {"kl_coefficient": 0.1, "kl_schedule": {"target": 0.0}},
        ["grpo.kl_schedule.target: must be above 0, got 0"],
    ),
    "overlong": (
        {"overlong_penalty": {"buffer_tokens": 7, "max_penalty": 1.0}},
        ["grpo.overlong_penalty.buffer_tokens: 7 is more than sampling.max_new_tokens = 6"],
    ),
    "overlong keys": (
        {"overlong_penalty": {"buffer_tokens": 2}},
        ["grpo.overlong_penalty.max_penalty: required key is missing"],
    ),
    "resampling": (
        {"dynamic_sampling": {"max_resample_factor": 1}},
        ["grpo.dynamic_sampling.max_resample_factor: must be at least 2, got 1"],
    ),
    "order": ({"prompt_order": "random"}, ["grpo.prompt_order", '"shuffled"', 'got "random"']),
    "loss": ({"loss": "grop"}, ["grpo.loss", "grop", "grpo"]),
    "missing": (
        {"updates": None, "sampling": {"seed": None}},
        ["grpo.updates: required key is missing", "grpo.sampling.seed: required key is missing"],
    ),
    "prompts": ({"prompts": "promts.jsonl"}, ["grpo.prompts", "promts.jsonl"]),
}


@pytest.mark.parametrize("name", GRPO_MISTAKES)
def test_mistakes_in_grpo(rollouts: Rollouts, name: str) -> None:
    table, words = GRPO_MISTAKES[name]
    refused(rollouts, rollouts.grpo(grpo=table), *words)


PPO_MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "clip": ({"clip_range": 1.0}, ["ppo.clip_range: must be above 0 and below 1, got 1"]),
    "kl": ({"kl_coefficient": -0.1}, ["ppo.kl_coefficient: must be at least 0, got -0.1"]),
    "batch": ({"rollout_batch_size": 1}, ["ppo.rollout_batch_size: must be at least 2, got 1"]),
    "top_p": ({"sampling": {"top_p": 0.0}}, ["ppo.sampling.top_p: must be above 0 and at most 1, got 0"]),
    "temperature": ({"sampling": {"temperature": 0.0}}, ["ppo.sampling.temperature: must be above 0, got 0"]),
    "critic": (
        {"critic": {"gamma": 0.0, "gae_lambda": 1.5, "value_lr": 0.0, "feature_dtype": "f8"}},
        [
            "ppo.critic.gamma: must be above 0 and at most 1, got 0",
            "ppo.critic.gae_lambda: must be at least 0 and at most 1, got 1.5",
            "ppo.critic.value_lr: must be above 0, got 0",
            'ppo.critic.feature_dtype: must be one of "f32", "f16", "bf16", got "f8"',
        ],
    ),
    "no critic": (
        {"critic": {"enabled": False, "gamma": 1.0, "value_epochs": 4}},
        [
            "ppo.critic.gamma: has no effect with enabled = false (leave it out, or set enabled = true)",
            "ppo.critic.value_epochs: has no effect with enabled = false",
        ],
    ),
    "keys of grpo": ({"group_size": 8}, ["ppo.group_size: unknown key"]),
    "a judge": ({"judge": JUDGE}, ["ppo.judge: unknown key"]),
    "no reward": ({"reward": None}, ["ppo.reward_command: required key is missing"]),
}


@pytest.mark.parametrize("name", PPO_MISTAKES)
def test_mistakes_in_ppo(rollouts: Rollouts, name: str) -> None:
    table, words = PPO_MISTAKES[name]
    refused(rollouts, rollouts.ppo(ppo=table), *words)


SHARED_MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two algorithms": (
        {"ppo": {"prompts": "prompts.jsonl"}},
        ["[ppo]: this section does not apply", "exactly one algorithm section"],
    ),
    "accumulation": (
        {"training": {"gradient_accumulation": 4}},
        ["training.gradient_accumulation", "ctx / micro_batch", "2"],
    ),
    "reference without a penalty": (
        {"reference": {"model": "model.gguf"}},
        ["is 0, so [reference] has no effect"],
    ),
    "epochs": ({"training": {"epochs": 2}}, ["training.epochs"]),
    "observe": ({"observe": {}}, ["observe.directory: required key is missing"]),
    "observe in a file": (
        {"observe": {"directory": "prompts.jsonl/observed"}},
        ["observe.directory: nothing can be recorded in", "prompts.jsonl is not a directory"],
    ),
}


@pytest.mark.parametrize("name", SHARED_MISTAKES)
def test_mistakes_in_other_tables(rollouts: Rollouts, name: str) -> None:
    tables, words = SHARED_MISTAKES[name]
    refused(rollouts, rollouts.grpo(**tables), *words)


def test_check_says_the_same(rollouts: Rollouts) -> None:
    """Several mistakes of a file at once."""
    table: dict[str, Any] = {}
    words: list[str] = []
    for name in ("temperature", "group of one", "order"):
        table |= GRPO_MISTAKES[name][0]
        words += GRPO_MISTAKES[name][1]
    found = [rollouts.command(command, rollouts.grpo(grpo=table), code=2) for command in ("check", "train")]
    assert found[0].errors == found[1].errors
    assert found[0].errors[0] == "error: 3 problems:"
    for word in words:
        assert word in "\n".join(found[0].errors)


def test_tables_of_other_algorithms_are_refused(rollouts: Rollouts) -> None:
    path = rollouts.toml(observe={"directory": "o"}, grpo={"updates": 1})
    found = rollouts.train(path, code=2)
    assert "[grpo]: this section does not apply" in "\n".join(found.errors)
    assert "[observe]: this section does not apply" in "\n".join(found.errors)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "ends on an answer": (
        {"messages": [user("a"), {"role": "assistant", "content": "b"}]},
        "ends on a message of role assistant, and a prompt ends on what the user asks",
    ),
    "no messages": ({"prompt": "a"}, "has no messages; its keys are 'prompt'"),
    "empty": ({"messages": []}, "messages: is empty (a prompt needs a user message)"),
    "empty content": ({"messages": [user("")]}, "content"),
    "a rubric that is no text": ({"messages": [user("a")], "rubric": 3}, "rubric: must be a string"),
    "too long": (
        {"messages": [user("long " * 40)]},
        "tokens and max_new_tokens = 6 are",
    ),
    "not JSON": ("{", "JSON"),
}


def test_every_bad_prompt_is_named_by_line(rollouts: Rollouts) -> None:
    """In the prompts and in the held-out file, all of them at once, before anything is drawn."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record, _ in BAD_PROMPTS.values()]
    for name in ("prompts.jsonl", "heldout.jsonl"):
        (rollouts / name).write_text("\n".join([json.dumps({"messages": [user("fine")]}), *lines]) + "\n")
    path = rollouts.grpo(evaluation={"data": "heldout.jsonl"})
    for command in ("check", "train"):
        found = rollouts.command(command, path, code=2)
        text = "\n".join(found.errors)
        assert f"{2 * len(lines)} problems" in text
        for name in ("prompts.jsonl", "heldout.jsonl"):
            for number, (_, words) in enumerate(BAD_PROMPTS.values(), 2):
                assert re.search(rf"{name}:{number}: .*{re.escape(words)}", text), text
    assert "more than training.ctx = 64" in text
    assert "raise ctx to" in text


def test_a_reference_with_another_tokenizer(rollouts: Rollouts, tiny_model: Callable[..., Path]) -> None:
    other = tiny_model(architecture="gemma3", block_count=1, embedding_length=32)
    tables = {"grpo": {"kl_coefficient": 0.1}, "reference": {"model": str(other)}}
    found = rollouts.train(rollouts.grpo(**tables), code=2)
    text = "\n".join(found.errors)
    assert "differs from that of" in text
    assert "the reference must share the model's tokenizer" in text
    tables["reference"] = {"model": "absent.gguf"}
    assert "absent.gguf" in "\n".join(rollouts.train(rollouts.grpo(**tables), code=2).errors)
    tables["reference"] = {"model": str(tiny_model(**SMALL)), "ctx": 32}
    text = "\n".join(rollouts.train(rollouts.grpo(**tables), code=2).errors)
    assert "reference.ctx" in text
