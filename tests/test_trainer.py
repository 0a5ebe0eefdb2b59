"""The Python interface on small models: training, scoring, answers, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import LoraConfig, SftConfig, Trainer, TrainingConfig
from retrograd.errors import ConfigError, RetrogradError
from retrograd_hookspecs import SamplingParams

MakeModel = Callable[..., Path]
RECORDS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"number {n}"}]}
    for n in range(8)
]


class Dictated:
    """A sampler that says given tokens, whatever the model thinks."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)

    def sample(self, logits: Any, params: SamplingParams, rng: np.random.Generator) -> tuple[int, float]:
        return next(self._tokens), 0.0


@pytest.fixture
def trainer(tiny_model: MakeModel) -> Iterator[Trainer]:
    with Trainer(
        tiny_model(),
        lora=LoraConfig(rank=2),
        training=TrainingConfig(ctx=64, micro_batch=64, lr=1e-2, epochs=3),
        device="reference",
    ) as made:
        yield made


def dictate(trainer: Trainer, tokens: list[int]) -> None:
    trainer._assembly.services.provide("sampler", Dictated(tokens))


def test_training_goes_on_from_where_it_is(trainer: Trainer, tmp_path: Path) -> None:
    steps: list[int] = []
    first = trainer.fit(RECORDS, evaluation=RECORDS[:2], callback=lambda report: steps.append(report.step))
    assert steps == list(range(1, first.steps + 1))
    assert first.first_evaluation is not None
    assert first.last_evaluation is not None
    assert first.last_evaluation.score < first.first_evaluation.score - 0.1
    trainer.save_adapter(tmp_path / "a.gguf")
    second = trainer.fit(RECORDS, evaluation=RECORDS[:2])
    assert second.first_evaluation is not None
    assert second.first_evaluation.score == first.last_evaluation.score
    again = trainer.score("say 3", " number 3")
    trainer.load_adapter(tmp_path / "a.gguf")
    assert trainer.score("say 3", " number 3") != again


def test_further_tables_and_keys_of_fit_add_up(tiny_model: MakeModel) -> None:
    with Trainer(
        tiny_model(),
        training=TrainingConfig(ctx=64, micro_batch=64, lr=0.0, epochs=5),
        device="reference",
        tables={"evaluation": {"patience": 2}, "optimizer": {"adamw": {"beta2": 0.9}}},
    ) as made:
        result = made.fit(RECORDS, evaluation=RECORDS[:2], shuffle=False)
    assert result.outcome == "stopped early"


def test_a_key_given_twice_is_refused(tiny_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"training\.lr: is given twice"):
        Trainer(tiny_model(), training=TrainingConfig(lr=1e-3), tables={"training": {"lr": 1e-2}})


def test_mistakes_are_refused_as_in_a_file(tiny_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(...\): training\.epocs: unknown key .*epochs"):
        Trainer(tiny_model(), tables={"training": {"epocs": 2}})


def test_score_sums_log_probabilities(trainer: Trainer) -> None:
    whole = trainer.score("the", " cat and the dog")
    parts = trainer.score("the", " cat") + trainer.score("the cat", " and the dog")
    assert whole == pytest.approx(parts, abs=1e-9)
    assert whole < 0


@pytest.mark.parametrize("space_prefix", [False, True])
def test_texts_keep_their_spaces(tiny_model: MakeModel, space_prefix: bool) -> None:
    """SentencePiece models that put a space before a text must not lose those between tokens."""
    metadata = {"tokenizer.ggml.add_space_prefix": space_prefix}
    path = tiny_model(architecture="gemma3", metadata=metadata)
    said = " the cat\u00e9 and the dog"
    with Trainer(path, device="reference") as made:
        prompt = made.tokenize("what is the", bos=True)
        tokens = made.tokenize("what is the" + said, bos=True)[len(prompt) :]
        stop = min(made._service("tokenizer").stop_ids)
        dictate(made, [*tokens, stop])
        assert made.generate("what is the", max_new_tokens=64) == said
        dictate(made, [*tokens, stop])
        assert made.chat("what is it", max_new_tokens=64) == said
        engine_score = made.score("what is the", said)
        assert engine_score == pytest.approx(_score_of_tokens(made, prompt, tokens), abs=1e-9)


def _score_of_tokens(trainer: Trainer, prompt: list[int], tokens: list[int]) -> float:
    from retrograd.engine import TrainingSequence

    ids = np.array([*prompt, *tokens], np.int32)
    sequence = TrainingSequence(tokens=ids, trained=np.arange(ids.size) >= len(prompt))
    [logp] = trainer._service("engine").log_probabilities([sequence])
    return float(logp.sum())


def test_a_closed_trainer_says_so(trainer: Trainer) -> None:
    trainer.close()
    trainer.close()
    with pytest.raises(RetrogradError, match="the trainer is closed"):
        trainer.tokenize("a")


def test_components_of_a_third_party(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Its trainable takes the place of LoRA, its algorithm runs by its name."""
    (tmp_path / "hooks.py").write_text(
        "import attrs\n"
        "from retrograd_hookspecs import hookimpl\n"
        "from retrograd_plugins.algorithms import sft\n"
        "from retrograd_plugins.trainables import lora\n\n\n"
        "@hookimpl\n"
        "def retrograd_trainables():\n"
        "    return [attrs.evolve(c, name='low', section='low_rank') for c in lora"
        ".retrograd_trainables()]\n\n\n"
        "@hookimpl\n"
        "def retrograd_algorithms():\n"
        "    return [attrs.evolve(c, name='imitate', section='imitation') for c in sft"
        ".retrograd_algorithms()]\n"
    )
    plugins = {"plugins": {"load": [str(tmp_path / "hooks.py")]}}
    settings = TrainingConfig(trainable="low", ctx=64, micro_batch=64)
    with Trainer(
        tiny_model(), lora=LoraConfig(rank=3), training=settings, device="reference", tables=plugins
    ) as trainer:
        assert trainer._values["low_rank"] == {"rank": 3}
        data = tmp_path / "d.jsonl"
        data.write_text("\n".join(json.dumps(record) for record in RECORDS))
        assert trainer.fit_algorithm("imitate", SftConfig(data=data)).steps == 3
        with pytest.raises(ConfigError, match=r"imitate: expected a SftConfig\(…\), got LoraConfig"):
            trainer.fit_algorithm("imitate", LoraConfig())
    with pytest.raises(ConfigError, match=r"low: expected a LoraConfig\(…\), got TrainingConfig"):
        Trainer(tiny_model(), lora=settings, training=settings, device="reference", tables=plugins)
