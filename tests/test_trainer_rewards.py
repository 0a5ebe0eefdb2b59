"""Learning from rewards in Python: functions as rewards, records as prompts, batches from elsewhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import (
    AnswerGroup,
    CommandJudge,
    CriticConfig,
    GRPOConfig,
    LoraConfig,
    PPOConfig,
    SamplingConfig,
    Trainer,
    TrainingConfig,
)
from retrograd.errors import ConfigError, DataError

MakeModel = Callable[..., Path]
PROMPTS = tuple({"messages": [{"role": "user", "content": f"say {n}"}]} for n in range(4))
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=8, seed=3)


@pytest.fixture
def trainer(tiny_model: MakeModel) -> Iterator[Trainer]:
    with Trainer(
        tiny_model(),
        lora=LoraConfig(rank=2),
        training=TrainingConfig(ctx=64, micro_batch=64, lr=1e-2, fast_sampling_context=False),
        device="reference",
    ) as made:
        yield made


def length(prompt: str, completion: str) -> float:
    return float(len(completion))


def grpo(**keys: Any) -> GRPOConfig:
    given: dict[str, Any] = {
        "prompts": PROMPTS,
        "reward": length,
        "updates": 2,
        "prompts_per_update": 2,
        "group_size": 4,
        "grpo_epochs": 1,
        "clip_range_low": 0.2,
        "clip_range_high": 0.28,
        "kl_coefficient": 0.0,
        "sampling": SAMPLING,
        **keys,
    }
    return GRPOConfig(**given)


def test_grpo_with_a_function(trainer: Trainer) -> None:
    reports: list[Any] = []
    result = trainer.fit_grpo(grpo(), evaluation=PROMPTS[:2], callback=reports.append)
    assert result.outcome == "finished"
    assert [report.step for report in reports] == [1, 2]
    assert reports[0].metrics["reward/max"] > reports[0].metrics["reward/min"]
    assert reports[0].metrics["generation/logprob_gap_max"] == 0.0
    assert result.last_evaluation is not None
    assert result.last_evaluation.higher_is_better


def test_ppo_with_a_function(trainer: Trainer) -> None:
    config = PPOConfig(
        prompts=PROMPTS,  # type: ignore[arg-type]
        reward=length,  # type: ignore[arg-type]
        updates=2,
        rollout_batch_size=4,
        ppo_epochs=2,
        clip_range=0.2,
        kl_coefficient=0.1,
        sampling=SAMPLING,
        critic=CriticConfig(value_epochs=3),
    )
    reports: list[Any] = []
    assert trainer.fit_ppo(config, callback=reports.append).steps == 4
    assert reports[0].metrics["train/value_loss"] < reports[0].metrics["train/value_loss_before"]


def test_a_judge_as_an_object(trainer: Trainer, tmp_path: Path) -> None:
    program = tmp_path / "judge.py"
    program.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    group = json.loads(line)\n"
        "    scores = [{'id': m['id'], 'score': 0.5, 'explanation': ''} for m in group['members']]\n"
        "    print(json.dumps({'group': group['group'], 'scores': scores}), flush=True)\n"
    )
    judge = CommandJudge(command=(sys.executable, str(program)))
    reports: list[Any] = []
    trainer.fit_grpo(grpo(judge=judge, judge_weight=2.0, updates=1), callback=reports.append)
    metrics = reports[0].metrics
    assert metrics["judge/score_mean"] == 0.5
    assert metrics["reward/total_mean"] == pytest.approx(metrics["reward/mean"] + 1.0)


def test_batches_from_elsewhere(trainer: Trainer) -> None:
    group = AnswerGroup(prompt="say 3", answers=("three", "no"), rewards=(1.0, 0.0))
    before = trainer.score("say 3", "three") - trainer.score("say 3", "no")
    for _ in range(3):
        metrics = trainer.train_grpo_batch([group], max_new_tokens=8)
    assert metrics["batch/groups_trained"] == 1.0
    assert metrics["policy/ratio_mean"] == 1.0
    assert trainer.score("say 3", "three") - trainer.score("say 3", "no") > before


def test_a_batch_without_spread_changes_nothing(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save_adapter(tmp_path / "before.gguf")
    group = AnswerGroup(prompt=[{"role": "user", "content": "hi"}], answers=("a", "b"), rewards=(1.0, 1.0))
    assert trainer.train_grpo_batch([group], max_new_tokens=8)["batch/groups_trained"] == 0.0
    trainer.save_adapter(tmp_path / "after.gguf")
    assert (tmp_path / "before.gguf").read_bytes() == (tmp_path / "after.gguf").read_bytes()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (AnswerGroup(prompt="a", answers=("b",), rewards=(1.0,)), "two answers or more"),
        (AnswerGroup(prompt="a", answers=("b", "c"), rewards=(1.0,)), "2 answers and 1 rewards"),
        (AnswerGroup(prompt="a", answers=("b", "c"), rewards=(1.0, float("nan"))), "not finite"),
        (AnswerGroup(prompt="a", answers=("b", "c"), rewards=(1.0, None)), "reward of answer 1 .* None"),  # type: ignore[arg-type]
        (AnswerGroup(prompt="a", answers=("b", "c"), rewards=("1", "0")), "must be a number, is '1'"),  # type: ignore[arg-type]
        (AnswerGroup(prompt="a", answers=("b" * 500, "c"), rewards=(1.0, 0.0)), "exceed training.ctx"),
        (AnswerGroup(prompt="a", answers=(None, "c"), rewards=(1.0, 0.0)), "answer 0 must be a text"),  # type: ignore[arg-type]
        (AnswerGroup(prompt="a", answers="bc", rewards=(1.0, 0.0)), "is one text"),
        (AnswerGroup(prompt=[], answers=("b", "c"), rewards=(1.0, 0.0)), "there are no messages"),
        (
            AnswerGroup(
                prompt=[{"role": "narrator", "content": "a"}], answers=("b", "c"), rewards=(1.0, 0.0)
            ),
            r"groups\[0\]\.prompt\[0\]: the role is 'narrator'",
        ),
        (
            AnswerGroup(prompt=[{"role": "user", "text": "a"}], answers=("b", "c"), rewards=(1.0, 0.0)),
            "unknown key 'text'",
        ),
        (
            AnswerGroup(
                prompt=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                answers=("b", "c"),
                rewards=(1.0, 0.0),
            ),
            "ends on a message of role assistant",
        ),
        ({"prompt": "a", "answers": ["b", "c"], "rewards": [1, 0]}, "expected a retrograd.AnswerGroup"),
    ],
)
def test_bad_batches_are_refused(trainer: Trainer, group: AnswerGroup, message: str) -> None:
    with pytest.raises(DataError, match=message):
        trainer.train_grpo_batch([group], max_new_tokens=8)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be an integer of at least 1, got 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: .* got 1.5"),
        ({"epochs": 0}, "epochs: must be an integer of at least 1, got 0"),
        ({"clip_range_low": -1.0}, "clip_range_low: must be above 0"),
        ({"clip_range_high": 0.1}, "clip_range_high: must be finite and at least clip_range_low = 0.2"),
        ({"baseline": "median"}, 'baseline: must be "mean" or "leave_one_out"'),
        ({"importance_sampling_level": "seq"}, 'must be "token" or "sequence"'),
    ],
)
def test_bad_settings_of_a_batch_are_refused(trainer: Trainer, keys: dict[str, Any], message: str) -> None:
    group = AnswerGroup(prompt="a", answers=("b", "c"), rewards=(1.0, 0.0))
    with pytest.raises(ConfigError, match=message):
        trainer.train_grpo_batch([group], **{"max_new_tokens": 8, **keys})


def test_groups_may_be_a_generator_and_rewards_an_array(trainer: Trainer) -> None:
    group = AnswerGroup(prompt="a", answers=("b", "c"), rewards=np.array([True, False]))  # type: ignore[arg-type]
    metrics = trainer.train_grpo_batch((g for g in [group]), max_new_tokens=8)  # type: ignore[arg-type]
    assert metrics["reward/mean"] == 0.5


@pytest.mark.parametrize("config", [{"prompts": []}, LoraConfig(rank=2), GRPOConfig, None])
def test_another_configuration_is_named(trainer: Trainer, config: Any) -> None:
    with pytest.raises(ConfigError, match=r"Trainer: grpo: expected a GRPOConfig\(…\), got"):
        trainer.fit_grpo(config)


def test_records_that_are_no_json(trainer: Trainer) -> None:
    with pytest.raises(DataError, match=r"prompts\[0\]: is not JSON: .*set"):
        trainer.fit_grpo(grpo(prompts=[{**PROMPTS[0], "tags": {"a"}}]))


def test_messages_of_a_chat_are_checked(trainer: Trainer) -> None:
    with pytest.raises(DataError, match=r"messages\[0\]: the content must be a string, is 5"):
        trainer.chat([{"role": "user", "content": 5}])


def test_mistakes_are_those_of_the_toml(trainer: Trainer) -> None:
    hot = SamplingConfig(temperature=0.5, top_p=1.0, max_new_tokens=8, seed=3)
    with pytest.raises(ConfigError, match=r"grpo\.sampling\.temperature"):
        trainer.fit_grpo(grpo(sampling=hot))
    assert json.dumps(PROMPTS)  # the caller's records are as they were


def test_the_example_of_the_page(
    tiny_model: MakeModel, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (repo_root / "docs" / "learning-from-rewards.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(from retrograd import AnswerGroup.*?)```", page, re.DOTALL)
    (tmp_path / "base.gguf").symlink_to(tiny_model())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, "learning-from-rewards.md", "exec"), names)
    assert names["result"].outcome == "finished"
    assert names["metrics"]["batch/groups_trained"] == 1.0
    assert (tmp_path / "adapter.gguf").is_file()
