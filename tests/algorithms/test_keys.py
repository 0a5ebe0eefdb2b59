"""Every key of `[grpo]` and `[ppo]` does what the reference says; what has a test elsewhere is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.testing.vocabulary import CHATML_TEMPLATE
from retrograd_hookspecs import RolloutGroup
from retrograd_plugins.algorithms._critic import Critic, CriticConfig
from retrograd_plugins.algorithms._kl import KlCoefficient, KlScheduleConfig
from retrograd_plugins.algorithms._prompts import PromptOrder

from .support import SMALL, Rollouts, watched

FLAT = """
import zlib

def score(prompt, completion):
    if prompt in {flat}:
        return 0.5
    return zlib.crc32((prompt + completion).encode()) % 1009 / 1009
"""
TEXTS = ["say 0", "say 1 please", "say 2 please please", "say 3", "say 4 please"]
"""The prompts of the folder, in order."""


def sources(groups: list[RolloutGroup]) -> list[int]:
    """Line numbers of the prompts."""
    return [int(group.source.rpartition(":")[2]) for group in groups]


def answers(groups: list[RolloutGroup]) -> list[list[int]]:
    return [rollout.tokens[rollout.trained].tolist() for group in groups for rollout in group.members]


def test_counts_of_grpo(rollouts: Rollouts) -> None:
    keys = {"updates": 3, "prompts_per_update": 2, "group_size": 4, "grpo_epochs": 2}
    watch = watched(rollouts.grpo(grpo=keys))
    assert [len(groups) for groups in watch.groups] == [2, 2, 2]
    assert all(len(group.members) == 4 for groups in watch.groups for group in groups)
    assert [(r.metrics["train/update"], r.metrics["train/epoch"]) for r in watch.reports] == [
        (update, epoch) for update in (1, 2, 3) for epoch in (1, 2)
    ]
    assert [report.boundary for report in watch.reports] == [False, True] * 3
    assert {report.total_steps for report in watch.reports} == {6}


def test_counts_of_ppo(rollouts: Rollouts) -> None:
    keys = {"updates": 2, "rollout_batch_size": 5, "ppo_epochs": 3}
    watch = watched(rollouts.ppo(ppo=keys))
    assert [[len(group.members) for group in groups] for groups in watch.groups] == [[1] * 5] * 2
    assert [report.step for report in watch.reports] == [1, 2, 3, 4, 5, 6]
    names = watch.reports[0].metrics.keys()
    # Groups of one have no spread to speak of.
    assert not {"reward/group_std_mean", "reward/zero_spread_fraction"} & names


def test_sequential_prompts_begin_anew_at_the_end(rollouts: Rollouts) -> None:
    watch = watched(rollouts.grpo(grpo={"updates": 4, "prompts_per_update": 2, "group_size": 2}))
    assert [sources(groups) for groups in watch.groups] == [[1, 2], [3, 4], [5, 1], [2, 3]]
    assert len({rollout.id for groups in watch.groups for group in groups for rollout in group.members}) == 16
    # The same prompt later on is answered from other random numbers.
    keys = {"updates": 2, "prompts_per_update": 5, "group_size": 2}
    watch = watched(rollouts.grpo(grpo=keys, training={"lr": 0.0}))
    assert answers(watch.groups[0]) != answers(watch.groups[1])


def test_shuffled_prompts(rollouts: Rollouts) -> None:
    """Each pass over the file in an order of its own, all prompts once."""

    def drawn(seed: int) -> list[int]:
        keys = {"updates": 4, "prompts_per_update": 5, "group_size": 2, "prompt_order": "shuffled"}
        watch = watched(rollouts.grpo(grpo={**keys, "sampling": {"seed": seed, "max_new_tokens": 2}}))
        return [source for groups in watch.groups for source in sources(groups)]

    order = drawn(0)
    passes = [tuple(order[i : i + 5]) for i in range(0, 20, 5)]
    assert all(sorted(one) == [1, 2, 3, 4, 5] for one in passes)
    assert len(set(passes)) > 1
    assert drawn(0) == order
    assert drawn(1) != order


def test_an_order_is_a_function_of_seed_and_draw_alone() -> None:
    order = PromptOrder(count=7, seed=3, shuffled=True)
    assert sorted(order.at(draw) for draw in range(7, 14)) == list(range(7))
    assert [order.at(9) for _ in range(2)] == [PromptOrder(count=7, seed=3, shuffled=True).at(9)] * 2
    assert [PromptOrder(count=3, seed=3, shuffled=False).at(draw) for draw in range(7)] == [0, 1, 2] * 2 + [0]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_seed_and_max_new_tokens(rollouts: Rollouts, algorithm: str) -> None:
    make = {"grpo": rollouts.grpo, "ppo": rollouts.ppo}[algorithm]

    def drawn(**sampling: Any) -> list[list[int]]:
        return answers(watched(make(**{algorithm: {"updates": 1, "sampling": sampling}})).groups[0])

    first = drawn()
    assert drawn() == first
    assert drawn(seed=1) != first
    short = drawn(max_new_tokens=3)
    assert max(map(len, short)) == 3
    assert short == [answer[:3] for answer in first]


def test_temperature_and_top_p(rollouts: Rollouts) -> None:
    def entropy(**sampling: Any) -> float:
        path = rollouts.ppo(ppo={"updates": 1, "rollout_batch_size": 12, "sampling": sampling})
        return watched(path).reports[0].metrics["policy/entropy"]

    assert entropy(temperature=0.3) < entropy() < entropy(temperature=3.0)
    assert entropy(top_p=0.3) < entropy()


def test_dynamic_sampling_replaces_groups_without_signal(rollouts: Rollouts) -> None:
    """Further prompts in order, until enough have signal or the factor is used up."""
    rollouts.python("reward.py", FLAT.format(flat=set(TEXTS[1:4])))
    keys = {"updates": 1, "prompts_per_update": 2, "group_size": 5}
    plain = watched(rollouts.grpo(grpo=keys))
    assert [report.metrics["batch/groups_trained"] for report in plain.reports] == [1.0]
    watch = watched(rollouts.grpo(grpo={**keys, "dynamic_sampling": {"max_resample_factor": 3}}))
    assert [sources(groups) for groups in watch.groups] == [[1, 2], [3], [4], [5]]
    [report] = watch.reports
    assert (report.metrics["batch/groups"], report.metrics["batch/groups_trained"]) == (5.0, 2.0)
    assert report.metrics["completions/length_mean"] > 0
    watch = watched(rollouts.grpo(grpo={**keys, "dynamic_sampling": {"max_resample_factor": 2}}))
    assert [sources(groups) for groups in watch.groups] == [[1, 2], [3], [4]]
    assert watch.reports[0].metrics["batch/groups_trained"] == 1.0
    # The next update goes on behind what was drawn.
    keys["updates"] = 2
    watch = watched(rollouts.grpo(grpo={**keys, "dynamic_sampling": {"max_resample_factor": 3}}))
    assert [sources(groups)[0] for groups in watch.groups][4:6] == [1, 3]


def test_template_variables(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """They reach the template, in training and in evaluations, and are part of the run's signature."""
    generation = "<|im_start|>assistant\\n"
    assert generation in CHATML_TEMPLATE
    thinking = CHATML_TEMPLATE.replace(generation, generation + "' + ('hm ' if thinking else '') + '")
    rollouts = Rollouts(tmp_path, tiny_model(**SMALL, chat_template=thinking))
    lengths, held_out = [], []
    for value in (False, True):
        for make, name in ((rollouts.grpo, "grpo"), (rollouts.ppo, "ppo")):
            table = {name: {"updates": 1, "template_variables": {"thinking": value}}}
            watch = watched(make(**table, evaluation={"data": "heldout.jsonl"}))
            lengths.append(watch.groups[0][0].prompt_tokens)
            held_out.append(watch.run.signature()["held-out prompts"])
    assert lengths[0] == lengths[1] < lengths[2] == lengths[3]
    assert held_out[0] != held_out[2]


@pytest.mark.parametrize("loss", ["cispo", "grpo_tis"])
def test_another_loss(rollouts: Rollouts, loss: str) -> None:
    """Chosen by name, with the options of its table; metrics of its own are logged."""
    rollouts.train(rollouts.grpo())
    usual = rollouts.adapter
    tables: dict[str, Any] = {"grpo": {"loss": loss, "grpo_epochs": 2}}
    if loss == "grpo_tis":
        tables["loss"] = {"grpo_tis": {"cap": 1.5}}
    rollouts.train(rollouts.grpo(**tables))
    assert rollouts.adapter != usual
    records = rollouts.updates()
    assert ("policy/importance_weight" in records[0]) == (loss == "grpo_tis")


def test_a_reference_of_its_own(rollouts: Rollouts, tiny_model: Callable[..., Path]) -> None:
    """The penalty is to that model: it is there from the first step on, and trains towards it."""
    rollouts.python("reward.py", FLAT.format(flat="[]"))
    keys = {"kl_coefficient": 0.5, "updates": 4, "prompts_per_update": 4}
    own = watched(rollouts.grpo(grpo=keys))
    assert own.reports[0].metrics["policy/kl_reference"] == pytest.approx(0.0, abs=1e-6)
    other = tiny_model(**SMALL, seed=1)
    found = watched(
        rollouts.grpo(
            grpo={**keys, "updates": 1, "grpo_epochs": 6, "kl_coefficient": 20.0},
            reference={"model": str(other)},
        )
    )
    distances = [report.metrics["policy/kl_reference"] for report in found.reports]
    assert distances[0] > 0.1
    assert distances[-1] < distances[0]
    same = watched(rollouts.grpo(grpo=keys, reference={"model": str(rollouts.model)}))
    for name, value in own.masters[-1].items():
        assert np.array_equal(value, same.masters[-1][name])


def test_without_a_penalty_no_reference_is_asked(rollouts: Rollouts) -> None:
    watch = watched(rollouts.grpo())
    assert "policy/kl_reference" not in watch.reports[0].metrics
    assert watch.reports[0].metrics["policy/kl_coefficient"] == 0.0


def test_evaluation_keys(rollouts: Rollouts) -> None:
    """Every second update; at most so many prompts, spread over the file; always the same answers."""
    rollouts.prompts("heldout.jsonl", [f"tell {n}" for n in range(7)])
    rollouts.python("reward.py", FLAT.format(flat="[]") + "    \n")
    evaluation = {"data": "heldout.jsonl", "every_iterations": 2, "max_examples": 3}
    rollouts.train(rollouts.grpo(grpo={"updates": 4}, evaluation=evaluation, training={"lr": 0.0}))
    records = [record for record in rollouts.metrics() if "eval/reward" in record]
    assert [record["step"] for record in records] == [0, 2, 4]
    assert {record["eval/prompts"] for record in records} == {3.0}
    assert len({record["eval/reward"] for record in records}) == 1
    unlimited = {"data": "heldout.jsonl"}
    rollouts.train(rollouts.grpo(grpo={"updates": 1}, evaluation=unlimited, training={"lr": 0.0}))
    assert {r["eval/prompts"] for r in rollouts.metrics() if "eval/prompts" in r} == {7.0}


def test_patience_on_rewards(rollouts: Rollouts) -> None:
    """Higher is better; the best evaluation is kept."""
    rollouts.python(
        "reward.py",
        """
        seen = []

        def score(prompt, completion):
            if prompt.startswith("tell"):
                seen.append(1)
                return {1: 0.2, 2: 0.6}.get((len(seen) + 2) // 3, 0.5)
            return float(len(completion) % 7)
        """,
    )
    found = rollouts.train(
        rollouts.grpo(
            grpo={"updates": 9},
            evaluation={"data": "heldout.jsonl", "patience": 2},
            checkpoint={"directory": "checkpoints", "mode": "best_eval"},
        )
    )
    assert "no improvement in 2 evaluations; the best was at step 1" in found.err
    assert "stopped early after 3 steps" in found.out
    assert rollouts.states() == ["best.state"]


@pytest.mark.parametrize(("dtype", "error"), [("f32", 6e-8), ("f16", 5e-4), ("bf16", 4e-3)])
def test_feature_dtype(dtype: Any, error: float) -> None:
    """Stored to the precision of the type, rounded to nearest; the head reads what is stored."""
    critic = Critic(CriticConfig(feature_dtype=dtype, value_epochs=200, value_lr=0.05), 3)
    features = [np.random.default_rng(n).normal(0, 1, (6, 3)) for n in range(4)]
    stored = critic.stored(features)
    assert {array.dtype.itemsize for array in stored} == {4 if dtype == "f32" else 2}
    truth = np.array([0.3, -1.0, 2.0])
    critic.fit(stored, [f @ truth + 0.5 for f in features])
    found = critic.values([np.eye(3, dtype=np.float32) if dtype != "bf16" else critic.stored([np.eye(3)])[0]])
    expected = truth + 0.5
    assert np.allclose(found[0], expected, atol=0.05)
    values = critic.values(stored)
    exact = [f @ critic.state()["weights"][:-1] + critic.state()["weights"][-1] for f in features]
    for value, wanted, feature in zip(values, exact, features, strict=True):
        assert np.abs(value - wanted).max() <= error * np.abs(feature).sum(1).max() * 3


def test_feature_dtype_in_a_run(rollouts: Rollouts) -> None:
    adapters = []
    for dtype in ("f32", "bf16"):
        rollouts.train(rollouts.ppo(ppo={"critic": {"feature_dtype": dtype}}))
        adapters.append(rollouts.adapter)
    assert adapters[0] != adapters[1]  # in the second update, when the head is no longer zero


def test_the_value_head_learns_in_a_run(rollouts: Rollouts) -> None:
    """More passes fit better; a head of an earlier update explains what comes."""
    rollouts.python("reward.py", "def score(prompt, completion):\n    return 3.0 + len(prompt) % 2\n")
    after = []
    for epochs in (1, 40):
        keys = {"updates": 1, "rollout_batch_size": 8, "critic": {"value_epochs": epochs, "value_lr": 0.05}}
        metrics = watched(rollouts.ppo(ppo=keys)).reports[0].metrics
        assert metrics["train/value_loss"] < metrics["train/value_loss_before"]
        after.append(metrics["train/value_loss"])
    assert after[1] < after[0] / 4


def test_kl_schedule() -> None:
    plain = KlCoefficient(0.5, KlScheduleConfig())
    plain.observe(0, 100.0)
    assert [plain.at(update) for update in range(3)] == [0.5] * 3
    warming = KlCoefficient(0.4, KlScheduleConfig(warmup_updates=4, target=0.1))
    assert [warming.at(update) for update in range(5)] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    warming.observe(3, 10.0)  # within the warm-up nothing adapts
    assert warming.at(4) == 0.4
    warming.observe(4, 10.0)
    assert warming.at(5) == pytest.approx(0.4 * 1.02)  # the error counts up to 0.2
    warming.observe(5, 0.095)
    assert warming.at(6) == pytest.approx(0.4 * 1.02 * (1 - 0.1 * 0.05))
    warming.observe(6, 0.1)
    assert warming.at(7) == warming.at(6)
