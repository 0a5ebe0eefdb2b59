"""Whole updates against the formulas written out a second time in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from retrograd_hookspecs import Rollout

from .oracle import (
    AdamW,
    Array,
    Model,
    Parameters,
    Slopes,
    ValueHead,
    grpo_advantages,
    grpo_slopes,
    ppo_slopes,
    whitened,
)
from .support import Rollouts, Watch, watched

REWARD = """
import zlib

def score(prompt, completion):
    number = zlib.crc32((prompt + completion).encode())
    if prompt == "say 1 please":
        return 0.5                        # no spread: the group is dropped
    if number % 9 == 0:
        raise ValueError("cannot be scored")
    return None if number % 9 == 1 else number % 11 / 10
"""
TRAINING = {"ctx": 64, "micro_batch": 16, "lr": 0.03, "weight_decay": 0.1, "fast_sampling_context": False}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8, "seed": 1}
EXACT = {"rtol": 2e-6, "atol": 2e-7}
"""float32 masters, and the moments of AdamW, against float64."""


def checked_step(
    model: Model,
    optimizer: AdamW,
    before: Parameters,
    rollouts: Sequence[Rollout],
    loss: Callable[[Sequence[Array]], Slopes],
) -> tuple[Slopes, dict[str, Array]]:
    """One optimizer step from `before`, and its slopes; the gradient is checked by finite differences."""
    model.set(before)
    slopes = loss(model.logp(rollouts))
    gradient = model.gradient(rollouts, slopes.dlogp)
    return slopes, optimizer.step(before, gradient, TRAINING["lr"])


def finite_differences(
    model: Model, before: Parameters, rollouts: Sequence[Rollout], loss: Callable[[Sequence[Array]], Slopes]
) -> None:
    """The gradient that `checked_step` uses is that of the loss's value, at some entries of some matrices."""
    model.set(before)
    gradient = model.gradient(rollouts, loss(model.logp(rollouts)).dlogp)
    rng = np.random.default_rng(0)
    names = [name for name in model.parameters if "attn_v" in name or "ffn_down" in name]
    for name in names:
        flat = model.parameters[name].weight.reshape(-1)
        index = int(np.argmax(np.abs(gradient[name]))) if rng.random() < 0.5 else int(rng.integers(flat.size))
        at, size = flat[index], 1e-5
        values = []
        for shift in (size, -size):
            flat[index] = at + shift
            values.append(loss(model.logp(rollouts)).loss)
        flat[index] = at
        numeric = (values[0] - values[1]) / (2 * size)
        np.testing.assert_allclose(gradient[name].reshape(-1)[index], numeric, rtol=1e-5, atol=1e-9)


def compare(watch: Watch, step: int, slopes: Slopes, after: Parameters) -> None:
    """What the run did in a step (from 0) is what the oracle does."""
    metrics = watch.reports[step].metrics
    assert metrics["train/loss"] == pytest.approx(slopes.loss, rel=1e-7, abs=1e-12)  # float32 features
    assert metrics["policy/ratio_mean"] == pytest.approx(slopes.ratio.mean(), rel=1e-10)
    for name, value in watch.masters[step + 1].items():
        np.testing.assert_allclose(value, after[name], **EXACT, err_msg=f"{name} after step {step + 1}")


CASES: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence": {"importance_sampling_level": "sequence"},
    "leave_one_out": {
        "baseline": "leave_one_out",
        "overlong_penalty": {"buffer_tokens": 6, "max_penalty": 0.4},
    },
    "masked": {
        "group_size": 12,
        "mask_truncated": True,
        "sampling": SAMPLING | {"max_new_tokens": 14, "seed": 3},
        "overlong_penalty": {"buffer_tokens": 7, "max_penalty": 0.7},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_grpo(rollouts: Rollouts, case: str) -> None:
    rollouts.python("reward.py", REWARD)
    table = {
        "prompts_per_update": 3,
        "group_size": 5,
        "grpo_epochs": 2,
        "clip_range_low": 0.1,
        "clip_range_high": 0.15,
        "kl_coefficient": 0.2,
        "sampling": SAMPLING,
        **CASES[case],
    }
    watch = watched(rollouts.grpo(grpo=table, training=TRAINING, lora={"rank": 2, "dtype": "f32"}))
    model = Model(watch.assembly.services.get("engine"))
    optimizer = AdamW(watch.masters[0], decay=0.1, max_norm=1.0)
    clipped = dropped = excluded = 0.0
    for update, groups in enumerate(watch.groups):
        answers = [rollout for group in groups for rollout in group.members]
        trained = grpo_advantages(groups, table)
        chosen, advantages = [r for r, _ in trained], [a for _, a in trained]
        excluded += sum(r.reward.kind != "value" for r in answers)
        dropped += sum(bool(group.dropped) for group in groups)
        metrics = watch.reports[2 * update].metrics
        assert metrics["batch/answers_trained"] == len(chosen)
        assert {r.id for r in chosen} == {
            r.id for g in groups if not g.dropped for r in g.members if not r.excluded
        }
        model.set(watch.masters[2 * update])
        old = model.logp(chosen)
        model.base()
        reference = model.logp(chosen)

        def loss(logp: Sequence[Array]) -> Slopes:
            return grpo_slopes(logp, old, reference, advantages, table)  # noqa: B023

        for step in (2 * update, 2 * update + 1):
            slopes, after = checked_step(model, optimizer, watch.masters[step], chosen, loss)
            compare(watch, step, slopes, after)
            metrics = watch.reports[step].metrics
            assert np.all(slopes.ratio == 1.0) or step % 2
            clipped += metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"]
            if case != "sequence" and update:  # there the gradient is by definition not the value's
                finite_differences(model, watch.masters[step], chosen, loss)
    assert len(watch.groups) == 2
    assert clipped > 0
    assert excluded > 0
    assert dropped > 0 or "overlong_penalty" in table  # which gives every group a spread
    assert watch.reports[-1].metrics["policy/kl_reference"] > 1e-4


@pytest.mark.parametrize("critic", [True, False])
def test_ppo(rollouts: Rollouts, critic: bool) -> None:
    rollouts.python("reward.py", REWARD.replace("0.5", "0.6"))
    table: dict[str, Any] = {
        "rollout_batch_size": 8,
        "ppo_epochs": 2,
        "clip_range": 0.03,
        "kl_coefficient": 0.3,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8, "seed": 3},
        "critic": {"enabled": critic},
    }
    head_keys = {"gamma": 0.95, "gae_lambda": 0.9, "value_lr": 0.05, "value_epochs": 5}
    if critic:
        table["critic"] |= head_keys
    watch = watched(rollouts.ppo(ppo=table, training=TRAINING, lora={"rank": 2, "dtype": "f32"}))
    model = Model(watch.assembly.services.get("engine"))
    optimizer = AdamW(watch.masters[0], decay=0.1, max_norm=1.0)
    head = ValueHead(32, head_keys)
    clipped = excluded = 0.0
    for update, groups in enumerate(watch.groups):
        answers = [rollout for group in groups for rollout in group.members]
        chosen = [r for r in answers if r.reward.kind == "value"]
        excluded += len(answers) - len(chosen)
        rewards = [r.reward.value for r in chosen]
        model.set(watch.masters[2 * update])
        old = model.logp(chosen)
        if critic:
            advantages = head.advantages(model.hidden(chosen), rewards)
        else:
            white = whitened(np.array(rewards))
            advantages = [np.full(o.size, a) for o, a in zip(old, white, strict=True)]

        def loss(logp: Sequence[Array]) -> Slopes:
            return ppo_slopes(logp, old, advantages, table)  # noqa: B023

        for step in (2 * update, 2 * update + 1):
            slopes, after = checked_step(model, optimizer, watch.masters[step], chosen, loss)
            compare(watch, step, slopes, after)
            if update:
                finite_differences(model, watch.masters[step], chosen, loss)
            metrics = watch.reports[step].metrics
            clipped += metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"]
    assert clipped > 0
    assert excluded > 0


def test_the_kl_coefficient_of_each_update(rollouts: Rollouts) -> None:
    """Warm-up from 0, then Ziegler's controller with the KL of each update's last pass."""
    schedule = {"warmup_updates": 2, "target": 0.01}
    keys: Mapping[str, Any] = {"updates": 5, "kl_coefficient": 0.5, "kl_schedule": schedule}
    watch = watched(rollouts.grpo(grpo={**keys, "max_stalled_updates": 0}))
    expected, found = 0.5, []
    for update, report in enumerate(watch.reports):
        found.append(report.metrics["policy/kl_coefficient"])
        assert found[-1] == pytest.approx(0.25 * update if update < 2 else expected, rel=1e-12)
        if update >= 2 and not report.stalled:
            error = report.metrics["policy/kl_reference"] / 0.01 - 1
            expected *= 1 + 0.1 * min(max(error, -0.2), 0.2)
    assert len(set(found)) > 3
