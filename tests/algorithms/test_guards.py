"""What a run says or does when learning cannot go well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from retrograd_hookspecs import LossBatch, LossResult
from retrograd_plugins.losses import grpo as grpo_loss
from retrograd_plugins.losses import ppo as ppo_loss

from .support import Rollouts, watched

SOMETIMES = """
import os, zlib

def score(prompt, completion):
    if {condition}:
        return 0.0
    return zlib.crc32((prompt + completion).encode()) % 11 / 10

def batch(path="{path}"):
    with open(path, "a") as file:
        file.write(".")
    return os.path.getsize(path)
"""


def test_truncation_is_said_once(rollouts: Rollouts) -> None:
    found = rollouts.train(rollouts.grpo())
    assert found.err.count("answers were cut at max_new_tokens = 6; raise it") == 1
    assert "(said once)" in found.err
    assert all(record["completions/truncated_fraction"] > 0.2 for record in rollouts.updates())


def test_truncation_below_a_fifth_is_not_said(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd.engine.generation import DecodingBatch

    step = DecodingBatch.step

    def stopped(self: Any, *arguments: Any) -> Any:
        done = step(self, *arguments)
        cut = [(n, c) for n, c in done if c.finish == "length" and n % 6]  # one of six stays cut
        return [(n, attrs.evolve(c, finish="stop")) if (n, c) in cut else (n, c) for n, c in done]

    monkeypatch.setattr(DecodingBatch, "step", stopped)
    found = rollouts.train(rollouts.grpo())
    assert "answers were cut" not in found.err
    assert max(record["completions/truncated_fraction"] for record in rollouts.updates()) > 0


@pytest.mark.parametrize(("most", "updates"), [(2, 3), (0, 6), (4, 5)])
def test_a_streak_without_signal_stops_the_run(rollouts: Rollouts, most: int, updates: int) -> None:
    """The first update trains, the others have no spread; 0 never stops."""
    condition = "len(calls) >= 6 or calls.append(1)"
    source = SOMETIMES.format(condition=condition, path=rollouts / "count") + "\ncalls = []\n"
    rollouts.python("reward.py", source)
    found = rollouts.train(rollouts.grpo(grpo={"updates": 6, "max_stalled_updates": most}))
    records = rollouts.updates()
    assert [record["batch/groups_trained"] > 0 for record in records] == [True, *[False] * (updates - 1)]
    assert found.err.count("no optimizer step: update ") == updates - 1
    if most:
        assert f"stopping: {most} updates in a row had no signal (max_stalled_updates)" in found.err
        assert "stopped early after 1 steps" in found.out
    else:
        assert "finished after 1 steps" in found.out


def test_a_streak_from_the_start_fails_and_says_why(rollouts: Rollouts) -> None:
    rollouts.python("reward.py", "def score(prompt, completion):\n    return 1.0\n")
    found = rollouts.train(rollouts.grpo(grpo={"updates": 9, "max_stalled_updates": 2}), code=1)
    assert "2 updates in a row had no signal" in found.err
    assert "no optimizer step: update 2: 2 groups: all rewards are equal" in "\n".join(found.errors)
    assert not (rollouts / "out" / "adapter.gguf").exists()


def test_a_streak_is_broken_by_a_step(rollouts: Rollouts) -> None:
    condition = "(calls.append(1) or len(calls) - 1) // 6 % 3"  # of three updates the first has signal
    source = SOMETIMES.format(condition=condition, path="") + "\ncalls = []\n"
    rollouts.python("reward.py", source)
    rollouts.train(rollouts.grpo(grpo={"updates": 6, "max_stalled_updates": 3}))
    assert [r["batch/groups_trained"] > 0 for r in rollouts.updates()] == [True, False, False] * 2


def test_dead_groups_are_out_of_numerator_and_denominator(rollouts: Rollouts) -> None:
    """KL term included: with an equal group beside it, a group is trained as if it were alone."""
    condition = "prompt == 'say 1 please'"
    rollouts.python("reward.py", SOMETIMES.format(condition=condition, path=""))
    keys = {"updates": 1, "kl_coefficient": 0.5, "grpo_epochs": 2}
    both = watched(rollouts.grpo(grpo={**keys, "prompts_per_update": 2}))
    alone = watched(rollouts.grpo(grpo={**keys, "prompts_per_update": 1}))
    assert both.reports[0].metrics["batch/groups_trained"] == 1.0
    for name, value in alone.masters[-1].items():
        assert np.array_equal(value, both.masters[-1][name])


Patched = Callable[[LossBatch], LossResult]


def broken_in(calls: set[int], loss: Patched) -> Patched:
    """The loss, with a gradient that is not finite in some of its calls."""
    count = 0

    def patched(batch: LossBatch) -> LossResult:
        nonlocal count
        count += 1
        result = loss(batch)
        return attrs.evolve(result, dlogp=result.dlogp * np.inf) if count in calls else result

    return patched


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_gradient_that_is_not_finite_is_skipped(
    rollouts: Rollouts, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"grpo": grpo_loss, "ppo": ppo_loss}[algorithm]
    monkeypatch.setattr(module, algorithm, broken_in({1}, getattr(module, algorithm)))
    make = {"grpo": rollouts.grpo, "ppo": rollouts.ppo}[algorithm]
    with np.errstate(invalid="ignore"):
        watch = watched(make(**{algorithm: {f"{algorithm}_epochs": 2}}, training={"micro_batch": 64}))
    assert [report.skipped for report in watch.reports] == [True, False, False, False]
    before, after = watch.masters[0], watch.masters[1]
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert all(np.isfinite(value).all() for value in watch.masters[-1].values())
    # Nothing was learnt in the first pass, so the second one is on-policy too.
    assert watch.reports[1].metrics["policy/ratio_mean"] == 1.0
    assert [r["optimizer/skipped_steps"] for r in rollouts.updates()] == [1.0] * 4


def test_gradients_that_are_never_finite_stop_the_run(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_loss, "grpo", broken_in(set(range(1000)), grpo_loss.grpo))
    with np.errstate(invalid="ignore"):
        found = rollouts.train(rollouts.grpo(grpo={"updates": 9}), code=1)
    assert "the gradient was not finite in 5 steps in a row" in "\n".join(found.errors)


def test_a_policy_that_ran_away_stops_with_the_remedy(rollouts: Rollouts) -> None:
    training = {"lr": 1e4, "max_grad_norm": 1e9}
    path = rollouts.grpo(grpo={"grpo_epochs": 4}, training=training, lora={"dtype": "f32"})
    with np.errstate(all="ignore"):
        found = rollouts.train(path, code=1)
    assert "the weights ran away; lower training.lr" in "\n".join(found.errors)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_loss_without_advantages_is_refused(rollouts: Rollouts, algorithm: str) -> None:
    """It would make every answer more likely, whatever its reward."""
    path = getattr(rollouts, algorithm)(**{algorithm: {"loss": "cross_entropy"}})
    for command, code in (("check", 2), ("train", 1)):
        text = "\n".join(rollouts.command(command, path, code=code).errors)
        assert 'loss = "cross_entropy" knows no rewards' in text
    assert not (rollouts / "out" / "adapter.gguf").exists()


@pytest.mark.parametrize(
    ("algorithm", "tables"),
    [("grpo", {}), ("ppo", {}), ("ppo", {"critic": {"enabled": False}})],
)
def test_rewards_too_far_apart_to_compare(
    rollouts: Rollouts, algorithm: str, tables: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    """They are not "all equal", and no sum of them overflows in silence."""
    rollouts.python(
        "reward.py",
        """
        import zlib

        def score(prompt, completion):
            return 1e300 * (-1) ** zlib.crc32(completion.encode())
        """,
    )
    path = getattr(rollouts, algorithm)(**{algorithm: tables})
    text = "\n".join(rollouts.command("train", path, code=1).errors)
    assert "rewards reach from -1e+300 to 1e+300" in text
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
