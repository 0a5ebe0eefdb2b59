"""The Python API: the same runs without a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from retrograd import LoraConfig, Trainer, TrainingConfig
from retrograd.errors import ConfigError, DataError, ModelError, RetrogradError, TrainingError
from retrograd.gguf.adapter import read_adapter
from retrograd.metrics import read_metrics
from retrograd_hookspecs import StepReport

from .support import Workspace, chats, retrograd, write_jsonl

TRAINING = TrainingConfig(ctx=128, micro_batch=64, lr=5e-3)


@pytest.fixture
def trainer(workspace: Workspace) -> Iterator[Trainer]:
    """A trainer on a tiny model."""
    with Trainer(
        workspace.model, lora=LoraConfig(rank=4), training=TRAINING, device=workspace.device
    ) as made:
        yield made


def test_it_does_what_the_command_does(workspace: Workspace, trainer: Trainer) -> None:
    retrograd("train", workspace.toml(evaluation={"data": "heldout.jsonl"}))
    result = trainer.fit(workspace / "train.jsonl", evaluation=workspace / "heldout.jsonl")
    assert result.outcome == "finished"
    assert result.steps == len(workspace.losses())
    assert result.first_evaluation is not None
    assert result.last_evaluation is not None
    assert [result.first_evaluation.score, result.last_evaluation.score] == [
        workspace.held_out()[0],
        workspace.held_out()[-1],
    ]
    trainer.save_adapter(workspace / "python.gguf")
    assert (workspace / "python.gguf").read_bytes() == workspace.adapter


def test_records_and_callbacks(trainer: Trainer) -> None:
    reports: list[StepReport] = []
    result = trainer.fit(chats(range(24)), evaluation=chats(range(100, 106)), callback=reports.append)
    assert [report.step for report in reports] == list(range(1, result.steps + 1))
    assert reports[-1].metrics["train/loss"] < reports[0].metrics["train/loss"]
    assert result.last_evaluation is not None
    assert result.first_evaluation is not None
    assert result.last_evaluation.score < 0.7 * result.first_evaluation.score


def test_records_and_a_file_are_the_same(workspace: Workspace, trainer: Trainer) -> None:
    trainer.fit(workspace / "train.jsonl")
    trainer.save_adapter(workspace / "file.gguf")
    with Trainer(
        workspace.model, lora=LoraConfig(rank=4), training=TRAINING, device=workspace.device
    ) as other:
        other.fit(iter(chats(range(24))))
        other.save_adapter(workspace / "records.gguf")
    assert (workspace / "file.gguf").read_bytes() == (workspace / "records.gguf").read_bytes()


def test_fit_twice_goes_on(trainer: Trainer) -> None:
    held_out = chats(range(100, 106))
    first = trainer.fit(chats(range(12)), evaluation=held_out)
    second = trainer.fit(chats(range(12, 24)), evaluation=held_out)
    assert first.last_evaluation is not None
    assert second.first_evaluation is not None
    assert second.last_evaluation is not None
    assert second.first_evaluation.score == first.last_evaluation.score
    assert second.last_evaluation.score < first.last_evaluation.score


def test_the_output_of_each_fit_is_there(trainer: Trainer) -> None:
    result = trainer.fit(chats(range(6)))
    assert len(read_adapter(result.output).factors) == 14
    records = list(read_metrics(result.output.with_suffix(".metrics.jsonl")))
    assert len([r for r in records if "train/loss" in r]) == result.steps


def test_adapters_are_saved_and_loaded(workspace: Workspace, trainer: Trainer) -> None:
    prompt, completion = "the world", " is yours"
    before = trainer.score(prompt, completion)
    trainer.save_adapter(workspace / "empty.gguf")
    trainer.fit(chats(range(12)))
    after = trainer.score(prompt, completion)
    trainer.save_adapter(workspace / "trained.gguf")
    assert after != before
    trainer.load_adapter(workspace / "empty.gguf")
    assert trainer.score(prompt, completion) == before
    trainer.load_adapter(workspace / "trained.gguf")
    assert trainer.score(prompt, completion) == after
    # As a start of another trainer, too.
    lora = LoraConfig(init_adapter=workspace / "trained.gguf")
    with Trainer(workspace.model, lora=lora, training=TRAINING, device=workspace.device) as other:
        assert other.score(prompt, completion) == after


def test_chat_generate_tokenize_score(trainer: Trainer) -> None:
    ids = trainer.tokenize("Hello world")
    assert trainer.tokenize("Hello world", bos=True) == [*trainer.tokenize("", bos=True), *ids]
    assert len(trainer.tokenize("<|im_end|>", special=True)) == 1 < len(trainer.tokenize("<|im_end|>"))
    trainer.fit(chats(range(24)) * 4)
    answer = trainer.chat("user number 4", temperature=0.0, max_new_tokens=32)
    assert answer.startswith("the world is yours")
    messages = [{"role": "user", "content": "user number 4"}]
    assert trainer.chat(messages, temperature=0.0, max_new_tokens=32) == answer
    rendered = "<|im_start|>user\nuser number 4<|im_end|>\n<|im_start|>assistant\n"
    assert trainer.generate(rendered, temperature=0.0, max_new_tokens=32) == answer
    # The learnt answer is likely, another one is not; and a score is a log-probability.
    likely, unlikely = trainer.score(rendered, answer), trainer.score(rendered, "of the user")
    assert unlikely < likely < 0
    parts = trainer.score(rendered, "the") + trainer.score(rendered + "the", " world")
    assert trainer.score(rendered, "the world") == pytest.approx(parts, rel=1e-6)
    drawn = {trainer.generate(rendered, temperature=2.0, seed=seed, max_new_tokens=8) for seed in range(4)}
    assert len(drawn) > 1
    assert trainer.generate(rendered, temperature=2.0, seed=1, max_new_tokens=8) in drawn


def test_scores_add_up_to_one(trainer: Trainer) -> None:
    """Over all tokens that one byte can be, and everything else: no more than 1."""
    total = sum(math.exp(trainer.score("the", chr(code))) for code in range(32, 127))
    assert 0 < total < 1


def test_text_data(workspace: Workspace, trainer: Trainer) -> None:
    (workspace / "train.txt").write_text("the world is yours and not the user's. " * 30)
    result = trainer.fit(workspace / "train.txt", data_format="text", shuffle=False)
    assert result.tokens > 200


def test_foreign_parts_and_sections(workspace: Workspace, extras: None) -> None:
    tables = {"optimizer": {"lion": {"beta1": 0.95}}, "loss": {"focal": {"gamma": 1.0}}}
    training = TrainingConfig(ctx=128, micro_batch=64, lr=1e-3, optimizer="lion")
    with Trainer(workspace.model, training=training, device=workspace.device, tables=tables) as trainer:
        result = trainer.fit(chats(range(12)), loss="focal")
    assert result.steps > 0


def test_after_close_everything_says_so(workspace: Workspace) -> None:
    trainer = Trainer(workspace.model, training=TRAINING, device=workspace.device)
    trainer.close()
    trainer.close()
    for use in (
        lambda: trainer.fit(chats(range(3))),
        lambda: trainer.chat("hi"),
        lambda: trainer.tokenize("hi"),
        lambda: trainer.save_adapter(workspace / "x.gguf"),
    ):
        with pytest.raises(RetrogradError, match="the trainer is closed"):
            use()


def test_an_exception_closes_it(workspace: Workspace) -> None:
    with (
        pytest.raises(KeyError),
        Trainer(workspace.model, training=TRAINING, device=workspace.device) as trainer,
    ):
        raise KeyError("mine")
    with pytest.raises(RetrogradError, match="closed"):
        trainer.tokenize("hi")


def test_mistakes(workspace: Workspace, trainer: Trainer, tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(\.\.\.\): model\.path: there is no file .*absent\.gguf"):
        Trainer("absent.gguf")
    with pytest.raises(ConfigError, match=r"training\.micro_batch: .* does not divide ctx = 128"):
        Trainer(workspace.model, training=TrainingConfig(ctx=128, micro_batch=48))
    with pytest.raises(ConfigError, match=r"sft\.data: there is no file .*absent\.jsonl"):
        trainer.fit("absent.jsonl")
    with pytest.raises(ConfigError, match=r"sft\.suffle: unknown key \(did you mean shuffle\?\)"):
        trainer.fit(chats(range(3)), suffle=True)
    with pytest.raises(DataError, match=r"train\.jsonl:2: "):
        trainer.fit([*chats([1]), {"messages": []}])
    with pytest.raises(DataError, match="holds no records"):
        trainer.fit([])
    trainer.save_adapter(workspace / "llama.gguf")
    with (
        Trainer(tiny_model(architecture="qwen2"), device="reference") as other,
        pytest.raises(ModelError, match="architecture 'llama'"),
    ):
        other.load_adapter(workspace / "llama.gguf")
    with pytest.raises(TypeError, match="temprature"):
        trainer.chat("hi", temprature=0.0)
    with pytest.raises(RetrogradError, match="exceed the context"):
        trainer.generate("user " * 600)
    with pytest.raises(ValueError, match="at least one token"):
        trainer.score("the", "")
    # After all of them it still trains.
    assert trainer.fit(chats(range(3))).outcome == "finished"


def test_a_failing_callback_is_named(trainer: Trainer) -> None:
    def fail(report: StepReport) -> None:
        raise ZeroDivisionError("in my callback")

    with pytest.raises(RetrogradError, match="ZeroDivisionError: in my callback"):
        trainer.fit(chats(range(3)), callback=fail)


def test_two_trainers_side_by_side(workspace: Workspace, tiny_model: Callable[..., Path]) -> None:
    made: list[Any] = []
    for architecture in ("llama", "qwen3"):
        made.append(Trainer(tiny_model(architecture=architecture), training=TRAINING, device="reference"))
    scores = [trainer.score("the", " world") for trainer in made]
    made[0].fit(chats(range(6)))
    assert made[1].score("the", " world") == scores[1]
    assert made[0].score("the", " world") != scores[0]
    for trainer in made:
        trainer.close()


def test_nothing_is_left_in_the_temporary_folder(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(ConfigError):
        Trainer("absent.gguf")
    with Trainer(workspace.model, training=TRAINING, device=workspace.device) as trainer:
        trainer.fit(chats(range(3)))
        write_jsonl(tmp_path / "more.jsonl", chats(range(3)))
        trainer.fit(tmp_path / "more.jsonl")
    assert list(temporary.iterdir()) == []


def test_training_that_cannot_work_raises(workspace: Workspace) -> None:
    with Trainer(workspace.model, training=TRAINING, device=workspace.device) as trainer:
        trainer.fit(chats(range(3)))
        for parameter in trainer._service("trainable").parameters:
            parameter.value[...] = float("nan")
        trainer._service("trainable").refresh()
        with pytest.raises(TrainingError, match="not finite"):
            trainer.fit(chats(range(24)))
