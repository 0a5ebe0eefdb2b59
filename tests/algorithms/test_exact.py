"""Sampler and trainer agree to the last bit, and what is drawn does not depend on how it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd_hookspecs import RolloutGroup

from .support import SMALL, Rollouts, Watch, watched

MakeModel = Callable[..., Path]
EXACT = {"fast_sampling_context": False}
LONG = ["tell me " * 9 + str(n) for n in range(3)]
"""Prompts of more tokens than the smaller passes below hold."""


def assert_on_policy(metrics: Mapping[str, float]) -> None:
    """Every ratio is exactly 1, and the sampler's log-probabilities are the trainer's bit for bit."""
    assert metrics["policy/ratio_mean"] == 1.0
    assert metrics["policy/approx_kl"] == 0.0
    assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 0.0
    assert metrics["generation/logprob_gap_max"] == 0.0


@pytest.mark.parametrize(
    ("architecture", "micro_batch", "fanout", "level"),
    [
        ("llama", 16, "auto", "token"),
        ("llama", 128, "max", "sequence"),
        ("llama", 32, "off", "token"),
        ("gemma3", 32, 2, "token"),
        ("qwen2", 16, "max", "sequence"),
        ("qwen3", 64, "auto", "token"),
    ],
)
def test_first_passes_are_on_policy(
    tmp_path: Path, tiny_model: MakeModel, architecture: str, micro_batch: int, fanout: Any, level: str
) -> None:
    """In the second update too, when the adapter is no longer zero."""
    model = tiny_model(architecture=architecture, format="Q8_0", formats={"token_embd*": "F16"})
    rollouts = Rollouts(tmp_path, model, "cpu")
    rollouts.prompts("prompts.jsonl", LONG)
    training = {"ctx": 128, "micro_batch": micro_batch, "shared_prefix_fanout": fanout, **EXACT}
    sampling = {"max_new_tokens": 20}
    grpo = {"importance_sampling_level": level, "grpo_epochs": 2, "sampling": sampling}
    watch = watched(rollouts.grpo(training=training, grpo=grpo))
    first, again, second, _ = (report.metrics for report in watch.reports)
    assert_on_policy(first)
    assert_on_policy(second)
    assert again["policy/ratio_mean"] != 1.0
    assert max(r.tokens.size for g in watch.groups[0] for r in g.members) > 48


@pytest.mark.parametrize("real", ["smollm2_path", "gemma3_path"])
def test_first_passes_are_on_policy_for_real_models(
    tmp_path: Path, request: pytest.FixtureRequest, real: str
) -> None:
    rollouts = Rollouts(tmp_path, request.getfixturevalue(real), "cpu")
    rollouts.prompts("prompts.jsonl", ["Name a colour.", "Name a small town."])
    training = {"ctx": 64, "micro_batch": 16, "lr": 1e-3, **EXACT}
    grpo = {"group_size": 2, "sampling": {"max_new_tokens": 5}, "max_stalled_updates": 0}
    watch = watched(rollouts.grpo(training=training, grpo=grpo, lora={"targets": ["q", "v"]}))
    trained = [report.metrics for report in watch.reports if not report.stalled]
    assert len(trained) == 2
    for metrics in trained:
        assert_on_policy(metrics)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_learning_rate_of_zero_changes_nothing(
    tmp_path: Path, tiny_model: MakeModel, algorithm: str, fast: bool
) -> None:
    rollouts = Rollouts(tmp_path, tiny_model(**SMALL), "cpu")
    tables: dict[str, Any] = {
        "training": {"lr": 0.0, "fast_sampling_context": fast},
        "evaluation": {"data": "heldout.jsonl"},
    }
    keys: dict[str, Any] = {"updates": 3}
    if algorithm == "grpo":
        path = rollouts.grpo(**tables, grpo={**keys, "grpo_epochs": 2, "kl_coefficient": 0.1})
    else:
        path = rollouts.ppo(**tables, ppo={**keys, "ppo_epochs": 2})
    watch = watched(path)
    for before, after in zip(watch.masters, watch.masters[1:], strict=False):
        assert all(np.array_equal(before[name], after[name]) for name in before)
    for report in watch.reports:
        assert report.metrics["policy/ratio_mean"] == 1.0
        assert report.metrics["policy/approx_kl"] == 0.0
        if algorithm == "grpo":  # `fast` rounds what is cached, and the reference caches other prompts
            assert report.metrics["policy/kl_reference"] <= (1e-6 if fast else 0.0)
    rewards = [r["eval/reward"] for r in rollouts.metrics() if "eval/reward" in r]
    assert len(rewards) == 4
    assert len(set(rewards)) == 1


def drawn(groups: list[RolloutGroup]) -> list[tuple[str, list[int], list[float]]]:
    return [(r.id, r.tokens.tolist(), r.logp.tolist()) for g in groups for r in g.members]


@pytest.mark.parametrize("fast", [True, False])
def test_rollouts_do_not_depend_on_how_many_are_drawn_at_once(
    tmp_path: Path, tiny_model: MakeModel, fast: bool
) -> None:
    """Nor on the tokens of a prompt pass; neither do the weights after two updates."""
    rollouts = Rollouts(tmp_path, tiny_model(block_count=2, format="Q8_0", metadata=SMALL["metadata"]), "cpu")

    def run(**training: Any) -> Watch:
        table = {"fast_sampling_context": fast, **training}
        return watched(rollouts.grpo(training=table, grpo={"group_size": 9, "prompts_per_update": 2}))

    whole = run()
    for concurrency, batch in ((1, 512), (4, 5), (18, 1)):
        other = run(generation_concurrency=concurrency, generation_batch=batch)
        for first, second in zip(whole.groups, other.groups, strict=True):
            assert drawn(first) == drawn(second)
        last = other.masters[-1]
        assert all(np.array_equal(value, last[name]) for name, value in whole.masters[-1].items())


def test_temperature_and_top_p_of_ppo(tmp_path: Path, tiny_model: MakeModel) -> None:
    """Old log-probabilities are the policy's own, whatever the sampler's settings."""
    rollouts = Rollouts(tmp_path, tiny_model(**SMALL), "cpu")
    sampling = {"temperature": 0.7, "top_p": 0.9}
    watch = watched(rollouts.ppo(training=EXACT, ppo={"sampling": sampling}))
    for report in watch.reports:
        assert_on_policy(report.metrics)
    fast = watched(rollouts.ppo(ppo={"sampling": sampling}))
    assert (
        "generation/logprob_gap_max" not in fast.reports[0].metrics
    )  # two distributions: no gap to speak of
    assert fast.reports[0].metrics["policy/ratio_mean"] == 1.0
