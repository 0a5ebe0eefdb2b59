"""`retrograd check`: everything that is wrong at once, and what to expect where nothing is."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from .support import Workspace, chats, retrograd, write_jsonl

SEVEN = Path(__file__).resolve().parents[1] / "config" / "seven_mistakes.toml"


def test_seven_mistakes_seven_messages(workspace: Workspace) -> None:
    path = shutil.copy(SEVEN, workspace / "seven.toml")
    shutil.copy(workspace.model, workspace / "model.gguf")
    messages = [
        (
            'kind = "adaptor"',
            'output.kind: must be one of "adapter", "trainable", "model", got "adaptor"'
            ' (did you mean "adapter"?)',
        ),
        ("rank = 8.5", "lora.rank: expected an integer, got 8.5"),
        ("lr_schedular", "training.lr_schedular: unknown key (did you mean lr_scheduler?)"),
        ("lr = ", 'training.lr: expected a number, got the string "1e-4" (write 1e-4 without quotes)'),
        ("weight_decay", "training.weight_decay: must be at least 0 and at most 1, got 1.5"),
        (
            "micro_batch",
            "training.micro_batch: micro_batch × gradient_accumulation = 48 × 1 = 48 does not divide"
            " ctx = 128 (line 19) (micro_batch may be 32 or 64)",
        ),
        ("[sft]", "sft.data: required key is missing (Training file.)"),
    ]
    lines = Path(path).read_text().splitlines()
    for command in ("check", "train"):
        found = retrograd(command, path, code=2)
        assert found.errors[0] == "error: 7 problems:"
        for (start, message), line in zip(messages, found.errors[1:], strict=True):
            number = next(n for n, text in enumerate(lines, 1) if text.startswith(start))
            assert line.strip() == f"{path}:{number}: {message}"
        assert found.out == ""


def test_mistakes_in_the_tables_of_components(workspace: Workspace) -> None:
    path = workspace.toml(
        training={"optimizer": "sgd", "lr_scheduler": "cosin"},
        optimizer={"sgd": {"momentun": 0.9}, "adamw": {"beta1": 0.9}},
        loss={"cross_entropy": {"smoothing": 1}},
        grpo={"group_size": 4},
        plugins={"load": ["absent.py"], "require": ["retrograd>=99"], "disable": ["nothing"]},
    )
    found = retrograd("check", path, code=2)
    text = "\n".join(found.errors)
    for words in (
        "training.lr_scheduler: no schedule 'cosin' is installed (did you mean 'cosine'?)",
        "optimizer.sgd.momentun: unknown key (did you mean momentum?)",
        "optimizer.adamw",
        "loss.cross_entropy.smoothing: unknown key",
        "grpo",
        "plugins.load: [plugins] load: there is no file",
        "plugins.require: retrograd 0.1.0 is installed: `pip install 'retrograd>=99'`",
        "plugins.disable: [plugins] disable: nothing installed is called 'nothing'",
    ):
        assert words in text
    assert found.errors[0] == "error: 8 problems:"


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_good_file(workspace: Workspace, device: str) -> None:
    path = workspace.toml(
        model={"device": device}, training={"epochs": 3}, evaluation={"data": "heldout.jsonl"}
    )
    found = retrograd("check", path, "--show", "2")
    lines = found.out.splitlines()
    assert lines[0].startswith("configuration: no problems (")
    assert re.search(r"LoRA: 8,192 values in 14 matrices of 2 blocks", found.out)
    for check in (
        "stop token",
        "BOS",
        "length",
        "trained share",
        "tool calls",
        "held-out data",
        "duplicates",
    ):
        assert re.search(rf"^(ok|note|warning) +{check}: ", found.out, re.MULTILINE), check
    # What is trained of the first two examples, in marks.
    assert found.out.count("⟦the world is yours ") == 2
    assert "<|im_end|>⟧" in found.out
    memory = re.search(r"^memory: about (\d+) MB \((.+)\); .+ free$", found.out, re.MULTILINE)
    assert memory is not None
    assert 100 < int(memory[1]) < 400
    time = re.search(r"^time: about [\d.]+ s a step here, .+ for (\d+) steps$", found.out, re.MULTILINE)
    assert time is not None
    # Nothing was written, and the number of steps is that of the run.
    assert sorted(p.name for p in workspace.directory.iterdir()) == [
        "heldout.jsonl",
        "run.toml",
        "train.jsonl",
    ]
    retrograd("train", path)
    assert len(workspace.losses()) == int(time[1])


def test_text_has_no_findings_about_templates(workspace: Workspace) -> None:
    (workspace / "train.txt").write_text("the world is yours and not the user's. " * 40)
    found = retrograd("check", workspace.toml(sft={"data": "train.txt"}))
    assert "stop token" not in found.out
    assert re.search(r"note +data: \d+ tokens in \d+ windows of up to 128; \d+ are trained", found.out)


def test_warnings_do_not_fail(workspace: Workspace) -> None:
    write_jsonl(workspace / "train.jsonl", [*chats(range(4)), *chats(range(2))])
    write_jsonl(workspace / "heldout.jsonl", chats([1]))
    found = retrograd("check", workspace.toml(evaluation={"data": "heldout.jsonl"}))
    assert "warning duplicates: 2 of 6 examples repeat an earlier one" in found.out
    assert "warning held-out data: 1 of 1 held-out examples are trained on too" in found.out


def test_more_warm_up_than_steps(workspace: Workspace) -> None:
    """Known once the data is read, so `check` says it too."""
    path = workspace.toml(training={"warmup_steps": 500})
    for command in ("check", "train"):
        [error] = retrograd(command, path, code=2).errors
        assert (
            f"error: {path}:{_line(path, 'warmup_steps')}: training.warmup_steps: 500 warm-up steps" in error
        )


def _line(path: Path, start: str) -> int:
    return next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.startswith(start))


def test_targets_that_do_not_exist(workspace: Workspace) -> None:
    path = workspace.toml(lora={"targets": ["q", "atn_k", "token_embd.weight"]})
    found = retrograd("check", path, code=2)
    text = "\n".join(found.errors)
    assert "run.toml:" in text
    assert "lora.targets" in text
    assert "atn_k" in text
