"""What goes wrong for users: one clear message that names what, where and how to mend; nothing lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrograd.gguf.adapter import read_adapter
from retrograd.gguf.reader import GGUFFile

from .support import Workspace, chats, retrograd, write_jsonl

TinyModel = Callable[..., Path]


def refused(path: Path, *arguments: object, code: int, words: list[str]) -> None:
    """`train` and `check` refuse with the same clear message, and the output does not come to be."""
    for command in ("train", "check"):
        found = retrograd(command, path, *arguments, code=code if command == "train" else 2)
        message = "\n".join(found.errors)
        assert message, found.err
        assert found.err.count("error: ") == 1
        for word in words:
            assert word in message
        assert "This is a fault in retrograd" not in found.err
    assert not (path.parent / "out" / "adapter.gguf").exists()


def with_bytes(source: Path, target: Path, change: Callable[[bytearray], None]) -> Path:
    """A copy of a file with some bytes changed."""
    data = bytearray(source.read_bytes())
    change(data)
    target.write_bytes(data)
    return target


def set_weight(model: Path, tensor: str, value: bytes) -> Callable[[bytearray], None]:
    """Overwrite the first bytes of a tensor."""
    first = GGUFFile(model).packed(tensor).tobytes()

    def change(data: bytearray) -> None:
        start = data.index(first)
        data[start : start + len(value)] = value

    return change


# Configuration and data: exit code 2.


def test_config_file_missing(workspace: Workspace) -> None:
    refused(
        workspace / "absent.toml",
        code=2,
        words=["absent.toml", "No such file", "give the path of a TOML file"],
    )


def test_config_file_is_not_toml(workspace: Workspace) -> None:
    path = workspace / "run.toml"
    path.write_text('[run]\nalgorithm = "sft"\n[training\nlr = 1\n')
    refused(path, code=2, words=["run.toml:3", "["])


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("training.lr", ["--set", "training.lr", "KEY=VALUE"]),
        ("=3", ["--set", "KEY=VALUE"]),
        ("training.lrr=3", ["--set", "training.lrr", "unknown key", "did you mean lr?"]),
        ("training.lr=fast", ["--set", "training.lr", "expected a number", "fast"]),
        ("training.epochs=-1", ["--set", "training.epochs", "at least 1", "-1"]),
        ("trainin.lr=1", ["--set", "trainin", "did you mean"]),
        ("training.optimizer=adamm", ["--set", "training.optimizer", "did you mean 'adamw'?"]),
    ],
)
def test_set_nonsense(workspace: Workspace, assignment: str, words: list[str]) -> None:
    refused(workspace.toml(), "--set", assignment, code=2, words=words)


def test_files_that_are_missing_are_all_named_with_their_lines(workspace: Workspace) -> None:
    path = workspace.toml(
        model={"path": "no-model.gguf"},
        sft={"data": "no-data.jsonl"},
        evaluation={"data": "no-heldout.jsonl"},
        training={"lr": -1.0},
    )
    lines = path.read_text().splitlines()
    words = ["4 problems"]
    for key, name in (
        ("model.path", "no-model.gguf"),
        ("sft.data", "no-data.jsonl"),
        ("evaluation.data", "no-heldout.jsonl"),
        ("training.lr", "-1.0"),
    ):
        number = next(n for n, line in enumerate(lines, 1) if name in line)
        words += [f"run.toml:{number}: {key}: ", name]
    refused(path, code=2, words=words)


def test_model_option_that_is_missing(workspace: Workspace) -> None:
    refused(workspace.toml(), "--model", "absent.gguf", code=2, words=["--model", "absent.gguf"])


def test_empty_data(workspace: Workspace) -> None:
    (workspace / "train.jsonl").write_text("")
    (workspace / "heldout.jsonl").write_text("\n\n")
    path = workspace.toml(evaluation={"data": "heldout.jsonl"})
    words = [str(workspace / "train.jsonl"), str(workspace / "heldout.jsonl"), "holds no records"]
    refused(path, code=2, words=words)


def test_data_is_a_directory(workspace: Workspace) -> None:
    (workspace / "folder").mkdir()
    path = workspace.toml(sft={"data": "folder", "data_format": "jsonl"})
    refused(path, code=2, words=["folder", "directory"])


def test_a_bad_line_731_and_its_friends(workspace: Workspace) -> None:
    records = [json.dumps(record) for record in chats(range(800))]
    records[730] = records[730][:-5]
    records[745] = json.dumps({"messages": []})
    (workspace / "train.jsonl").write_text("\n".join(records))
    write_jsonl(workspace / "heldout.jsonl", [{"messages": [{"role": "user", "content": "alone"}]}])
    refused(
        workspace.toml(evaluation={"data": "heldout.jsonl"}),
        code=2,
        words=[
            "3 problems",
            f"{workspace / 'train.jsonl'}:731: is not valid JSON",
            f"{workspace / 'train.jsonl'}:746: ",
            f"{workspace / 'heldout.jsonl'}:1: ",
        ],
    )


def test_an_example_longer_than_the_context(workspace: Workspace) -> None:
    write_jsonl(workspace / "train.jsonl", [*chats(range(3)), chats([10**200])[0]])
    words = [f"{workspace / 'train.jsonl'}:4", "training.ctx", "128"]
    refused(workspace.toml(), code=2, words=words)


def test_output_cannot_be_written(workspace: Workspace) -> None:
    (workspace / "out").write_text("a file where the directory should be")
    found = retrograd("train", workspace.toml(), code=2)
    message = "\n".join(found.errors)
    for word in ("output.path", str(workspace / "out" / "adapter.gguf"), "cannot be written", "run.toml:"):
        assert word in message
    assert "step 1" not in found.err  # told before training, not after it


def test_output_is_a_directory(workspace: Workspace) -> None:
    (workspace / "out" / "adapter.gguf").mkdir(parents=True)
    found = retrograd("train", workspace.toml(), code=2)
    assert "is a directory" in "\n".join(found.errors)


def test_output_would_replace_the_model(workspace: Workspace) -> None:
    copy = workspace / "base.gguf"
    copy.write_bytes(workspace.model.read_bytes())
    path = workspace.toml(model={"path": "base.gguf"}, output={"path": "base.gguf"})
    found = retrograd("train", path, code=2)
    assert "output.path" in "\n".join(found.errors)
    assert copy.read_bytes() == workspace.model.read_bytes()


# Models: the file is there, but cannot be used.


@pytest.mark.parametrize("keep", [3, 100, 0.5, 0.999])
def test_truncated_model(workspace: Workspace, keep: float) -> None:
    data = workspace.model.read_bytes()
    broken = workspace / "broken.gguf"
    broken.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    refused(workspace.toml(model={"path": "broken.gguf"}), code=1, words=[str(broken)])


def test_model_is_something_else(workspace: Workspace) -> None:
    (workspace / "notes.gguf").write_text("# my notes\n" * 50)
    words = [str(workspace / "notes.gguf"), "GGUF"]
    refused(workspace.toml(model={"path": "notes.gguf"}), code=1, words=words)


def test_unknown_pre(workspace: Workspace, tiny_model: TinyModel) -> None:
    model = tiny_model(metadata={"tokenizer.ggml.pre": "mystery-bpe"})
    words = [str(model), "tokenizer.ggml.pre", "mystery-bpe"]
    refused(workspace.toml(model={"path": str(model)}), code=1, words=words)


def test_unknown_architecture(workspace: Workspace) -> None:
    def rename(data: bytearray) -> None:
        start = data.index(b"llama", data.index(b"general.architecture"))
        data[start : start + 5] = b"lamma"

    model = with_bytes(workspace.model, workspace / "lamma.gguf", rename)
    words = [str(model), "'lamma'", "did you mean 'llama'?", "installed: "]
    refused(workspace.toml(model={"path": "lamma.gguf"}), code=1, words=words)


def test_chat_data_on_a_model_without_template_is_a_warning(
    workspace: Workspace, tiny_model: TinyModel
) -> None:
    found = retrograd("train", workspace.toml(model={"path": str(tiny_model(chat_template=""))}))
    assert "warning: chat template: the model has no chat template" in found.err


# Checkpoints of another run.


@pytest.fixture
def resumable(workspace: Workspace) -> dict[str, Any]:
    """Tables of a run that has checkpoints."""
    tables: dict[str, Any] = {"checkpoint": {"directory": "checkpoints", "mode": "steps", "every_steps": 4}}
    retrograd("train", workspace.toml(**tables))
    return tables


def not_resumed(workspace: Workspace, path: Path, words: list[str], *, code: int = 1) -> None:
    """`--resume` is refused, and checkpoints and output stay as they are."""
    before = {p: p.read_bytes() for p in sorted(workspace.directory.rglob("*.gguf"))}
    states = workspace.states()
    found = retrograd("train", path, "--resume", code=code)
    message = "\n".join(found.errors)
    for word in words:
        assert word in message
    assert workspace.states() == states
    assert {p: p.read_bytes() for p in before} == before


def test_checkpoint_of_another_model(
    workspace: Workspace, resumable: dict[str, Any], tiny_model: TinyModel
) -> None:
    other = tiny_model(seed=1)
    path = workspace.toml(**resumable, model={"path": str(other)})
    not_resumed(workspace, path, ["step-", "model: ", "in the checkpoint", "without --resume"])


def test_checkpoint_of_other_data(workspace: Workspace, resumable: dict[str, Any]) -> None:
    write_jsonl(workspace / "train.jsonl", chats(range(1, 25)))
    path = workspace.toml(**resumable)
    not_resumed(workspace, path, ["step-", "data: ", "in the checkpoint"])


def test_checkpoint_of_other_settings(workspace: Workspace, resumable: dict[str, Any]) -> None:
    path = workspace.toml(**resumable, training={"lr": 1e-4}, optimizer={"adamw": {"beta1": 0.8}})
    words = ["training.lr: 0.005 in the checkpoint, 0.0001 now", "optimizer.adamw.beta1: 0.9"]
    not_resumed(workspace, path, words)


def test_checkpoint_of_another_rank(workspace: Workspace, resumable: dict[str, Any]) -> None:
    path = workspace.toml(**resumable, lora={"rank": 8})
    not_resumed(workspace, path, ["lora.rank: 4 in the checkpoint, 8 now"])


def test_damaged_checkpoint_names_another(workspace: Workspace, resumable: dict[str, Any]) -> None:
    states = workspace.states()
    newest = workspace / "checkpoints" / states[-1] / "tensors.safetensors"
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size - 100)
    not_resumed(workspace, workspace.toml(**resumable), [str(newest), "damaged", states[-2]])


def test_nothing_to_resume(workspace: Workspace) -> None:
    found = retrograd("train", workspace.toml(), "--resume", code=1)
    assert "holds no checkpoint" in "\n".join(found.errors)
    found = retrograd("train", workspace.toml(), "--resume", workspace / "absent.state", code=1)
    assert str(workspace / "absent.state") in "\n".join(found.errors)


def test_init_adapter_and_resume_exclude_each_other(workspace: Workspace, resumable: dict[str, Any]) -> None:
    path = workspace.toml(**resumable, lora={"rank": None, "init_adapter": "out/adapter.gguf"})
    not_resumed(workspace, path, ["run.toml:", "lora.init_adapter", "resume"], code=2)


# Numbers that are not finite.

POISON = """
@hookimpl
def retrograd_step_finished(run, report):
    for parameter in run.trainable.parameters:
        if report.step in {steps}:
            parameter.{array}[...] = float("nan")
"""


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("format", "value"),
    [
        ("F32", b"\x00\x00\xc0\x7f"),  # NaN
        ("F32", b"\xff\xff\xff\xff"),  # the NaN of erased flash and of damaged files
        ("F16", b"\xff\xff"),
        ("BF16", b"\x80\x7f"),  # infinity
    ],
)
def test_a_weight_that_is_not_finite_trains_nothing(
    workspace: Workspace, tiny_model: TinyModel, format: str, value: bytes, device: str
) -> None:
    base = tiny_model(format=format)
    model = with_bytes(base, workspace / "nan.gguf", set_weight(base, "blk.1.ffn_up.weight", value))
    write_jsonl(workspace / "train.jsonl", chats(range(3)))
    path = workspace.toml(
        model={"path": str(model), "device": device},
        training={"epochs": 9},
        evaluation={"data": "heldout.jsonl"},
        checkpoint={"directory": "checkpoints", "mode": "steps_and_best_eval", "every_steps": 2},
    )
    found = retrograd("train", path, code=1)
    message = "\n".join(found.errors)
    assert "not finite in 5 steps in a row" in message
    assert "no step was applied: the model file is damaged" in message
    assert found.err.count("SKIPPED: gradient not finite") == 5
    assert not (workspace / "out" / "adapter.gguf").exists()
    records = [r for r in workspace.metrics() if "train/loss" in r]
    assert [r["optimizer/skipped_steps"] for r in records] == [1, 2, 3, 4, 5]
    assert records[0]["train/loss"] is None
    assert records[0]["nonfinite"]["train/loss"] in ("nan", "inf")
    # Checkpoints on the way hold the weights before the first step; no evaluation was the best.
    assert workspace.states() == ["step-000002.state", "step-000004.state", "step-000005.state"]
    for adapter in (workspace / "checkpoints").glob("*.gguf"):
        assert all((b == 0).all() for _, b in read_adapter(adapter).factors.values())


def test_poisoned_gradients_are_skipped_and_counted(workspace: Workspace) -> None:
    hook = POISON.format(steps=(3, 4, 9), array="grad")
    (workspace / "poison.py").write_text(f"from retrograd_hookspecs import hookimpl\n{hook}")
    found = retrograd("train", workspace.toml(plugins={"load": ["poison.py"]}))
    assert "3 steps were skipped: their gradient was not finite" in found.out
    records = [r for r in workspace.metrics() if "train/loss" in r]
    norms = [r["step"] for r in records if r["optimizer/grad_norm"] is None]
    assert norms == [4, 5, 10]
    assert records[-1]["optimizer/skipped_steps"] == 3


def test_too_many_poisoned_gradients_stop_the_run_with_a_good_checkpoint(workspace: Workspace) -> None:
    hook = POISON.format(steps=tuple(range(6, 30)), array="grad")
    (workspace / "poison.py").write_text(f"from retrograd_hookspecs import hookimpl\n{hook}")
    tables: dict[str, Any] = {"checkpoint": {"directory": "checkpoints", "mode": "steps", "every_steps": 3}}
    retrograd("train", workspace.toml(**tables))
    whole = workspace.adapter
    for name in ("out", "checkpoints"):
        os.rename(workspace / name, workspace / f"{name}.whole")
    path = workspace.toml(**tables, plugins={"load": ["poison.py"]})
    found = retrograd("train", path, code=1)
    assert "not finite in 5 steps in a row" in "\n".join(found.errors)
    assert "--resume" in found.err
    assert not (workspace / "out" / "adapter.gguf").exists()
    # Back to before the trouble, with its cause gone: as if it had never been.
    path = workspace.toml(**tables)
    retrograd("train", path, "--resume", workspace / "checkpoints" / "step-000006.state")
    assert workspace.adapter == whole


def test_poisoned_weights_are_never_written(workspace: Workspace) -> None:
    hook = POISON.format(steps=(6,), array="value")
    hook += "    run.trainable.refresh()\n"
    (workspace / "poison.py").write_text(f"from retrograd_hookspecs import hookimpl\n{hook}")
    path = workspace.toml(
        plugins={"load": ["poison.py"]},
        checkpoint={"directory": "checkpoints", "mode": "steps", "every_steps": 3},
    )
    found = retrograd("train", path, code=1)
    assert "not finite" in "\n".join(found.errors)
    assert workspace.states() == ["step-000003.state"]
    assert not (workspace / "out" / "adapter.gguf").exists()


def test_a_hook_that_fails_is_named_and_the_step_is_kept(workspace: Workspace) -> None:
    (workspace / "bad.py").write_text(
        "from retrograd_hookspecs import hookimpl\n"
        "@hookimpl\ndef retrograd_step_finished(run, report):\n"
        "    if report.step == 4 and not run.output.with_name('mended').exists():\n"
        "        raise ValueError('my mistake')\n"
    )
    path = workspace.toml(plugins={"load": ["bad.py"]})
    found = retrograd("train", path, code=1)
    message = "\n".join(found.errors)
    assert "retrograd_step_finished: a hook raised ValueError: my mistake" in message
    assert "go on from step 4 with --resume" in found.err
    (workspace / "out" / "mended").touch()
    retrograd("train", path, "--resume")
    resumed = workspace.adapter
    retrograd("train", path)
    assert workspace.adapter == resumed
