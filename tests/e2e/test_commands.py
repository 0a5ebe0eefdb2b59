"""Every other command, as a user calls it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from retrograd.plugins import Catalogue

from .support import Workspace, retrograd, start_process

COMMANDS = sorted(name.replace("_", "-") for name in Catalogue.installed().names("commands"))


# Help.


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command: str) -> None:
    found = retrograd(command, "--help")
    assert found.out.startswith(f"Usage: retrograd {command}")
    assert found.err == ""


def test_help_lists_the_commands() -> None:
    found = retrograd("--help")
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\S", found.out, re.MULTILINE), command
    assert retrograd("--version").out.startswith("retrograd, version 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "a.toml", "--fast"], "No such option"),
        (["inspect"], "--model is required"),
        (["export", "--model", "m.gguf"], "Missing option '--adapter'"),
        (["plugins", "list", "--kind", "optimisers"], "kinds: "),
        (["chat", "a.toml", "--temp", "-1"], "-1.0 is not in the range x>=0"),
        (["chat", "a.toml", "--top-p", "2"], "2.0 is not in the range 0<x<=1"),
        (["chat", "a.toml", "--max-new-tokens", "0"], "0 is not in the range x>=1"),
    ],
)
def test_usage_errors(arguments: list[str], words: str) -> None:
    found = retrograd(*arguments, code=2)
    assert words in found.err
    assert found.out == ""


@pytest.mark.parametrize("arguments", [["config-schema"], ["plugins", "list"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    process = start_process(*arguments)
    assert process.stdout is not None
    process.stdout.close()  # as `| head -0` does, before anything was written
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_a_run_whose_reader_goes_away_is_a_success(workspace: Workspace) -> None:
    process = start_process("train", workspace.toml())
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert (workspace / "out" / "adapter.gguf").exists()


def test_progress_on_a_terminal(workspace: Workspace) -> None:
    """A bar with loss, speed and time left, where stderr is a terminal; the data goes to stdout."""
    terminal, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "retrograd",
            "train",
            str(workspace.toml(evaluation={"data": "heldout.jsonl"})),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    out, _ = process.communicate()
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "training" in text
    assert "step 17/17  epoch 1.00  loss " in text
    assert "tok/s" in text
    assert "left" in text
    assert "evaluation (before training): loss" in text
    assert "Traceback" not in text
    assert "finished after 17 steps" in out


# Plugins and schema.


def test_plugins_list() -> None:
    found = retrograd("plugins", "list")
    assert re.search(r"^optimizers:\n  adamw +retrograd 0\.", found.out, re.MULTILINE)
    rows = json.loads(retrograd("plugins", "list", "--json").out)
    assert {"kind", "name", "distribution", "version", "module"} == set(rows[0])
    assert [(r["kind"], r["name"]) for r in rows] == sorted((r["kind"], r["name"]) for r in rows)
    only = json.loads(retrograd("plugins", "list", "--json", "--kind", "optimizers").out)
    assert {r["name"] for r in only} >= {"adamw", "sgd"}
    assert {r["kind"] for r in only} == {"optimizers"}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """What `config-schema` prints."""
    values: dict[str, Any] = json.loads(retrograd("config-schema").out)
    return values


def test_schema_is_valid_draft_07(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(schema)


def test_schema_accepts_what_runs_and_refuses_typos(schema: dict[str, Any], workspace: Workspace) -> None:
    path = workspace.toml(
        evaluation={"data": "heldout.jsonl"},
        checkpoint={"directory": "c", "mode": "best_eval"},
        optimizer={"adamw": {"beta1": 0.8}},
    )
    retrograd("train", path)
    good = tomllib.loads(path.read_text())
    resolved = tomllib.loads((workspace / "out" / "adapter.resolved.toml").read_text())
    validator = jsonschema.Draft7Validator(schema)
    for values in (good, resolved):
        assert list(validator.iter_errors(values)) == []
    for section, key, value in [
        ("training", "lerning_rate", 1.0),
        ("training", "lr", "1e-4"),
        ("training", "weight_decay", 1.5),
        ("training", "optimizer", 3),
        ("lora", "rank", 8.5),
        ("sft", "dta", "x"),
        ("trainin", "lr", 1.0),
        ("optimizer", "adamw", {"beta3": 0.1}),
    ]:
        bad = {**good, section: {**good.get(section, {}), key: value}}
        assert list(validator.iter_errors(bad)), (section, key)


# Models.


def test_inspect(workspace: Workspace) -> None:
    options = ["--model", workspace.model, "--device", "cpu"]
    found = retrograd("inspect", *options)
    for line in (
        "  architecture: llama",
        "  blocks: 2",
        "  heads: 4 query, 2 key/value, 16 wide",
        "  q: blk.*.attn_q.weight × 2, 64 → 64, F32",
        "  ffn_down: blk.*.ffn_down.weight × 2, 128 → 64, F32",
        "  pre: llama-bpe",
        "  template: in the model",
        "  tools: native",
        "  backend: cpu",
    ):
        assert line in found.out
    values = json.loads(retrograd("inspect", *options, "--json").out)
    assert values["shape"]["blocks"] == 2
    assert set(values["LoRA targets"]) == {"q", "k", "v", "o", "ffn_gate", "ffn_up", "ffn_down"}
    assert all(values["kernels"].values())
    # Every target that it lists can be trained under that name.
    retrograd("train", workspace.toml(lora={"targets": list(values["LoRA targets"])}))


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2", "qwen3"])
def test_inspect_other_architectures(architecture: str, tiny_model: Callable[..., Path]) -> None:
    found = retrograd("inspect", "--model", tiny_model(architecture=architecture), "--json")
    assert json.loads(found.out)["model"]["architecture"] == architecture


def test_preflight(workspace: Workspace, tiny_model: Callable[..., Path]) -> None:
    options = ["--model", workspace.model, "--device", "cpu"]
    rows = json.loads(retrograd("preflight", *options, "--json").out)
    assert {row["op"] for row in rows} >= {"matmul", "attention", "rms_norm", "sum_squares"}
    assert all(row["variant"] for row in rows)
    text = retrograd("preflight", *options, "--targets", "q", "--targets", "v").out
    assert re.search(rf"^{len(rows)} ops, \d+ served by fallbacks$", text, re.MULTILINE)
    assert retrograd("preflight", *options, "--strict", code=None).code == int(
        any(not row["fast"] for row in rows)
    )
    # A format without a kernel of its own is served by a fallback, and `--strict` says so.
    slow = tiny_model(
        formats={"blk.*.ffn_down.weight": "IQ3_S"}, embedding_length=256, feed_forward_length=256
    )
    retrograd("preflight", "--model", slow, "--device", "cpu")
    found = retrograd("preflight", "--model", slow, "--device", "cpu", "--strict", code=1)
    assert re.search(r"^matmul +IQ3_S +\S+  fallback: correct but slow$", found.out, re.MULTILINE)
    found = retrograd("preflight", *options, "--targets", "atn_q", code=2)
    assert "atn_q" in found.err


def test_model_that_is_missing(workspace: Workspace) -> None:
    for command in (["inspect"], ["preflight"], ["export", "--adapter", workspace.model, "--out", "b"]):
        found = retrograd(*command, "--model", "absent.gguf", code=2)
        assert "absent.gguf" in found.err


# After training.


@pytest.fixture
def trained(workspace: Workspace) -> Path:
    """A run file whose adapter is there."""
    path = workspace.toml(
        model={"device": "cpu"}, training={"epochs": 4}, evaluation={"data": "heldout.jsonl"}
    )
    retrograd("train", path)
    return path


def test_bench(workspace: Workspace, trained: Path) -> None:
    found = retrograd("bench", trained)
    assert re.search(r"^ +base +adapter$", found.out, re.MULTILINE)
    rows = json.loads(retrograd("bench", trained, "--json").out)
    held_out = workspace.held_out()
    assert rows["base"]["eval/loss"] == pytest.approx(held_out[0], rel=1e-12)
    assert rows["adapter"]["eval/loss"] == pytest.approx(held_out[-1], rel=1e-12)

    two = json.loads(retrograd("bench", trained, "--json", "--limit", 2).out)
    assert 0 < two["base"]["eval/tokens"] < rows["base"]["eval/tokens"]
    on_training = json.loads(retrograd("bench", trained, "--json", "--data", workspace / "train.jsonl").out)
    assert on_training["base"]["eval/tokens"] > rows["base"]["eval/tokens"]

    (workspace / "out" / "adapter.gguf").rename(workspace / "moved.gguf")
    assert set(json.loads(retrograd("bench", trained, "--json").out)) == {"base"}
    moved = json.loads(retrograd("bench", trained, "--json", "--adapter", workspace / "moved.gguf").out)
    assert moved == rows
    found = retrograd("bench", trained, "--adapter", "absent.gguf", code=2)
    assert "--adapter: there is no file " in found.err


def test_bench_without_held_out_data(workspace: Workspace) -> None:
    found = retrograd("bench", workspace.toml(), code=2)
    assert "--data" in found.err


def chat(path: Path, *options: object, stdin: str, code: int = 0) -> list[str]:
    """Lines that `chat` answers with, greedily."""
    found = retrograd("chat", path, "--temp", 0, "--max-new-tokens", 24, *options, stdin=stdin, code=code)
    return found.out.splitlines()


def test_chat(trained: Path) -> None:
    [answer] = chat(trained, stdin="user number 3\n")
    assert answer.startswith("the world is yours")
    assert "<|im_end|>" not in answer
    assert chat(trained, stdin="user number 3\n/exit\nuser number 4\n") == [answer]
    assert chat(trained, stdin="\n\n") == []
    [base] = chat(trained, "--base-only", stdin="user number 3\n")
    assert base != answer
    both = chat(trained, "--compare", stdin="user number 3\n")
    assert both == [f"base: {base}", f"adapter: {answer}"]


def test_chat_remembers_until_reset(trained: Path) -> None:
    again = chat(trained, stdin="user number 3\n/reset\nuser number 3\n")
    assert again[0] == again[1]
    # Two turns are one conversation: the base model's second answer depends on the first turn.
    base = chat(trained, "--base-only", stdin="user number 3\nuser number 3\n")
    fresh = chat(trained, "--base-only", stdin="user number 3\n/reset\nuser number 3\n")
    assert base[0] == fresh[0] == fresh[1] != base[1]


def test_chat_seed_and_temperature(trained: Path) -> None:
    options = ["--base-only", "--temp", 1.5, "--top-p", 1.0]
    first = chat(trained, *options, "--seed", 1, stdin="user number 3\n")
    assert chat(trained, *options, "--seed", 1, stdin="user number 3\n") == first
    assert chat(trained, *options, "--seed", 2, stdin="user number 3\n") != first


def test_chat_system_message(trained: Path) -> None:
    plain = chat(trained, "--base-only", stdin="hello\n")
    assert chat(trained, "--base-only", "--system", "you are the user", stdin="hello\n") != plain


def test_chat_without_an_adapter(workspace: Workspace) -> None:
    path = workspace.toml(model={"device": "cpu"})
    found = retrograd("chat", path, stdin="hello\n", code=2)
    assert "--base-only" in found.err
    assert len(chat(path, "--base-only", stdin="hello\n")) >= 1


def test_chat_longer_than_the_context_goes_on(trained: Path) -> None:
    found = retrograd(
        "chat", trained, "--max-new-tokens", 24, "--temp", 0,
        stdin="user " * 600 + "\n/reset\nuser number 3\n",
    )  # fmt: skip
    assert "exceed the context of 512 tokens" in found.err
    assert "the world is yours" in found.out


def test_chat_with_an_adapter_of_another_model(trained: Path, tiny_model: Callable[..., Path]) -> None:
    other = tiny_model(architecture="qwen2")
    found = retrograd("chat", trained, "--model", other, stdin="hello\n", code=1)
    assert "the adapter is for the architecture 'llama'" in found.err


@pytest.mark.parametrize("command", ["export", "merge"])
def test_export(workspace: Workspace, trained: Path, command: str) -> None:
    adapter, out = workspace / "out" / "adapter.gguf", workspace / "merged.gguf"
    options = ["--model", workspace.model, "--adapter", adapter, "--out", out, "--device", "reference"]
    found = retrograd(command, *options, "--type", "f32", "--modelfile")
    assert f"wrote {out}" in found.out
    kl = re.search(r"KL ([\d.e+-]+) nats a token on average", found.out)
    assert kl is not None
    assert float(kl[1]) < 1e-6
    modelfile = (workspace / "merged.Modelfile").read_text()
    assert "FROM ./merged.gguf" in modelfile
    assert "<|im_end|>" in modelfile
    # It is a model: it loads, and its held-out loss is the tuned one's.
    adapter.unlink()
    values = json.loads(retrograd("bench", trained, "--model", out, "--json").out)
    assert values["base"]["eval/loss"] == pytest.approx(workspace.held_out()[-1], rel=1e-2)


def test_export_refuses_to_replace_its_inputs(workspace: Workspace, trained: Path) -> None:
    adapter = workspace / "out" / "adapter.gguf"
    base = workspace / "base.gguf"
    base.write_bytes(workspace.model.read_bytes())
    for out in (base, adapter):
        before = out.read_bytes()
        found = retrograd("export", "--model", base, "--adapter", adapter, "--out", out, code=1)
        assert "would replace" in found.err
        assert out.read_bytes() == before


def test_export_with_a_text_that_cannot_be_read(workspace: Workspace, trained: Path) -> None:
    out = workspace / "merged.gguf"
    adapter = workspace / "out" / "adapter.gguf"
    options = ["--model", workspace.model, "--adapter", adapter, "--out", out]
    found = retrograd("export", *options, "--text", workspace / "none.txt", code=2)
    assert "--text: cannot read" in found.err
    assert not out.exists()
