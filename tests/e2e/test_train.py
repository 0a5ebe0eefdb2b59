"""`retrograd train` on every data format: it learns, and leaves what the documentation promises."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from pathlib import Path

import pytest

from retrograd.gguf.adapter import read_adapter

from .support import Workspace, chats, retrograd, write_jsonl

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Finds a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]


def structured_conversation(number: int) -> dict[str, object]:
    """A call that the template writes, its result, and an answer."""
    arguments = {"word": f"w{number}"}
    return {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": f"what is w{number}?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "the world"},
            {"role": "assistant", "content": "it is the world"},
        ],
    }


def raw_conversation(number: int) -> dict[str, object]:
    """The same conversation with the exact text of the call."""
    record = json.loads(json.dumps(structured_conversation(number)))
    call = json.dumps({"name": "lookup", "arguments": {"word": f"w{number}"}})
    record["messages"][1] |= {"content": f"<tool_call>\n{call}\n</tool_call>", "raw": True}
    return record  # type: ignore[no-any-return]


@pytest.fixture
def data(workspace: Workspace, request: pytest.FixtureRequest) -> tuple[str, str]:
    """Training and held-out file of the format that the test names."""
    kind = request.param
    if kind == "chat":
        return "train.jsonl", "heldout.jsonl"
    if kind == "text":
        line = "and the world is yours, and the user is not. "
        (workspace / "train.txt").write_text(line * 60)
        (workspace / "heldout.txt").write_text("the world is not the user's. " + line * 4)
        return "train.txt", "heldout.txt"
    make = structured_conversation if kind == "structured" else raw_conversation
    write_jsonl(workspace / "tools.jsonl", [make(number) for number in range(8)])
    write_jsonl(workspace / "tools-heldout.jsonl", [make(number) for number in range(50, 52)])
    return "tools.jsonl", "tools-heldout.jsonl"


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("data", ["chat", "structured", "raw", "text"], indirect=True)
def test_held_out_loss_falls_and_everything_is_written(
    workspace: Workspace, data: tuple[str, str], device: str
) -> None:
    train, held_out = data
    path = workspace.toml(
        model={"device": device},
        training={"epochs": 2, "ctx": 512, "micro_batch": 256, "lr": 2e-2},
        sft={"data": train},
        evaluation={"data": held_out},
    )
    found = retrograd("train", path)

    losses = workspace.held_out()
    assert len(losses) == 3  # before, and after each epoch
    assert losses[-1] < 0.7 * losses[0]
    adapter = read_adapter(workspace / "out" / "adapter.gguf")
    assert len(adapter.factors) == 14
    assert all(abs(b).max() > 0 for _, b in adapter.factors.values())
    assert "held-out before: " in found.out
    assert "held-out after: " in found.out
    assert f"result: {workspace / 'out' / 'adapter.gguf'}" in found.out
    assert "read back, its logits equal the trainer's" in found.err
    assert sorted(p.name for p in (workspace / "out").iterdir()) == [
        "adapter.gguf",
        "adapter.metrics.jsonl",
        "adapter.resolved.toml",
    ]


def test_raw_and_structured_calls_are_the_same_tokens(workspace: Workspace) -> None:
    adapters = []
    for make in (structured_conversation, raw_conversation):
        write_jsonl(workspace / "train.jsonl", [make(number) for number in range(4)])
        retrograd("train", workspace.toml(training={"ctx": 512, "micro_batch": 256}))
        adapters.append(workspace.adapter)
    assert adapters[0] == adapters[1]


def test_metrics_hold_every_step_and_evaluation(workspace: Workspace) -> None:
    retrograd("train", workspace.toml(training={"epochs": 2}, evaluation={"data": "heldout.jsonl"}))
    records = workspace.metrics()
    steps = [r for r in records if "train/loss" in r]
    evaluations = [r for r in records if "eval/loss" in r]
    assert [r["step"] for r in steps] == list(range(1, len(steps) + 1))
    half = max(r["step"] for r in steps if r["train/epoch"] <= 1)
    assert [r["step"] for r in evaluations] == [0, half, len(steps)]
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(records))
    for record in steps:
        assert record["train/perplexity"] == pytest.approx(math.exp(record["train/loss"]))
        assert record["batch/tokens"] >= record["batch/trained_tokens"] > 0
        assert record["optimizer/lr"] == 5e-3
        assert record["optimizer/grad_norm"] > 0
        assert record["optimizer/skipped_steps"] == 0
        assert record["timing/tokens_per_second"] > 0
        assert record["system/memory_rss_bytes"] > 1e6
        assert 0 < record["packing/efficiency"] <= 1
    epochs = [r["train/epoch"] for r in steps]
    assert epochs == sorted(epochs)
    assert epochs[-1] == 2.0
    # Every trained token of both epochs was seen once.
    trained = sum(r["batch/trained_tokens"] for r in steps)
    assert trained == 2 * sum(r["batch/trained_tokens"] for r in steps[:half])


def test_the_resolved_file_repeats_the_run(workspace: Workspace) -> None:
    path = workspace.toml(
        training={"lr_scheduler": "cosine", "warmup_steps": 2, "weight_decay": 0.01},
        evaluation={"data": "heldout.jsonl"},
        optimizer={"adamw": {"beta2": 0.95}},
    )
    retrograd("train", path, "--set", "training.lr=1e-3", "--set", "lora.seed=7")
    first = workspace.adapter
    resolved = workspace / "out" / "adapter.resolved.toml"
    again = workspace / "elsewhere" / "again.toml"
    again.parent.mkdir()
    again.write_bytes(resolved.read_bytes())
    values = tomllib.loads(resolved.read_text())
    assert (values["training"]["lr"], values["lora"]["seed"]) == (1e-3, 7)
    assert values["optimizer"]["adamw"] == {"beta1": 0.9, "beta2": 0.95, "eps": 1e-08}
    assert "retrograd 0." in resolved.read_text()

    (workspace / "out" / "adapter.gguf").unlink()
    retrograd("train", again)
    assert workspace.adapter == first
    # And resolving it again changes no value.
    assert tomllib.loads(resolved.read_text()) == values


def test_the_seed_decides(workspace: Workspace) -> None:
    adapters = []
    for seed in (1, 1, 2):
        retrograd("train", workspace.toml(lora={"seed": seed}))
        adapters.append(workspace.adapter)
    assert adapters[0] == adapters[1] != adapters[2]


def test_flags_override_the_file(workspace: Workspace, tmp_path: Path) -> None:
    path = workspace.toml(model={"path": "absent.gguf", "device": "cuda"})
    retrograd("train", path, "--model", workspace.model, "--device", "reference")
    values = tomllib.loads((workspace / "out" / "adapter.resolved.toml").read_text())
    assert values["model"] == {"path": str(workspace.model), "device": "reference"}


def test_patience_and_best_checkpoint(workspace: Workspace) -> None:
    # A learning rate of zero never improves.
    path = workspace.toml(
        training={"epochs": 9, "lr": 0.0},
        evaluation={"data": "heldout.jsonl", "patience": 2},
        checkpoint={"directory": "checkpoints", "mode": "best_eval"},
    )
    found = retrograd("train", path)
    assert "stopped early" in found.out
    assert "no improvement in 2 evaluations" in found.err
    losses = workspace.held_out()
    # Nothing was learnt, so evaluation by evaluation the loss is the very same number.
    assert losses == [losses[0]] * 4
    assert workspace.states() == ["best.state"]


def test_packing_does_not_change_what_is_learnt(workspace: Workspace) -> None:
    """One conversation a pass, or several: sequences do not leak into each other."""
    write_jsonl(workspace / "train.jsonl", chats(range(4)))
    losses = []
    for micro_batch, accumulation in ((256, 1), (32, 8)):
        training = {
            "ctx": 256,
            "micro_batch": micro_batch,
            "gradient_accumulation": accumulation,
            "kv_dtype": "f32",  # f16 would round the keys and values of earlier passes
        }
        retrograd("train", workspace.toml(training=training, sft={"shuffle": False}))
        losses.append(list(workspace.losses().values()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_start_from_an_adapter(workspace: Workspace) -> None:
    retrograd("train", workspace.toml(evaluation={"data": "heldout.jsonl"}))
    after = workspace.held_out()[-1]
    (workspace / "out" / "adapter.gguf").rename(workspace / "first.gguf")
    path = workspace.toml(
        lora={"rank": None, "init_adapter": "first.gguf"}, evaluation={"data": "heldout.jsonl"}
    )
    retrograd("train", path)
    assert workspace.held_out()[0] == after
    assert workspace.held_out()[-1] < after


def test_verbose_says_what_is_well_too(workspace: Workspace) -> None:
    quiet = retrograd("train", workspace.toml())
    verbose = retrograd("train", workspace.toml(run={"verbose": True}))
    for words in ("ok: stop token: all 24 trained turns", "NumPy float64 (reference)"):
        assert words not in quiet.err
        assert words in verbose.err
