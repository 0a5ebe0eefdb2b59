"""What training wrote, in stock llama.cpp: adapters have the effect that was trained, exports run alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd.assembly import assemble
from retrograd.config import Document
from retrograd.gguf.reader import GGUFFile
from retrograd.gguf.writer import TensorPlan, write_gguf
from tests.llamacpp.llamacpp import LlamaCpp

from .support import Workspace, chats, retrograd, write_jsonl

LogProbabilities = npt.NDArray[np.float64]
"""(T, V): of the token after each of T tokens."""

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 250, 40)]


def ours(
    model: Path, tokens: Sequence[int], adapter: Path | None = None, device: str = "reference"
) -> LogProbabilities:
    """The trainer's own log-probabilities, with keys and values unrounded as in the tests' llama.cpp."""
    values: dict[str, Any] = {
        "model": {"path": str(model), "device": device},
        "training": {"ctx": 64, "micro_batch": 64, "kv_dtype": "f32"},
    }
    if adapter is not None:
        values["lora"] = {"init_adapter": str(adapter)}
    engine = assemble(Document.from_values(values), algorithm=False).services.get("engine")
    logits = np.array(engine.logits(np.array(tokens, np.int32)), np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def kl(p: LogProbabilities, q: LogProbabilities) -> float:
    """KL(p ‖ q) in nats, the mean over positions."""
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=1)))


# llama.cpp multiplies with F16 factors after it rounded the activations to F16, which training does not.
F16_FACTORS = 2e-4


@pytest.mark.parametrize("format", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen2", "qwen3"])
def test_an_adapter_has_its_effect_in_llamacpp(
    workspace: Workspace,
    tiny_model: Callable[..., Path],
    llamacpp: LlamaCpp,
    architecture: str,
    format: str,
) -> None:
    model = tiny_model(architecture=architecture, format=format)
    write_jsonl(workspace / "train.jsonl", chats(range(9)))
    adapter = workspace / "out" / "adapter.gguf"
    base = ours(model, TOKENS)
    without = llamacpp.next_token_logprobs(model, TOKENS)
    for dtype in ("f32", "f16"):
        retrograd("train", workspace.toml(model={"path": str(model)}, lora={"dtype": dtype}))
        tuned = ours(model, TOKENS, adapter)
        there = llamacpp.next_token_logprobs(model, TOKENS, adapter=adapter)
        assert kl(tuned, base) > 0.3  # the adapter does something
        rounding = F16_FACTORS if dtype == "f16" else 0.0
        assert kl(tuned, there) <= 3 * kl(base, without) + rounding + 1e-11
        if dtype == "f32":
            assert np.abs(there - tuned).max() <= 3 * np.abs(without - base).max() + 1e-5


def test_smollm2_trained_a_few_steps(workspace: Workspace, smollm2_path: Path, llamacpp: LlamaCpp) -> None:
    write_jsonl(workspace / "train.jsonl", chats(range(12)))
    path = workspace.toml(
        model={"path": str(smollm2_path), "device": "cpu"},
        lora={"rank": 8},
        training={"ctx": 128, "micro_batch": 128, "lr": 5e-3},
    )
    retrograd("train", path)
    losses = list(workspace.losses().values())
    assert losses[-1] < 0.5 * losses[0]
    adapter = workspace / "out" / "adapter.gguf"
    text = "<|im_start|>user\nuser number 7<|im_end|>\n<|im_start|>assistant\nthe world is yours the world"
    [tokens] = llamacpp.tokenize(smollm2_path, [text], special=True)
    base, tuned = (ours(smollm2_path, tokens, file, "cpu") for file in (None, adapter))
    without = llamacpp.next_token_logprobs(smollm2_path, tokens)
    there = llamacpp.next_token_logprobs(smollm2_path, tokens, adapter=adapter)
    assert kl(tuned, base) > 0.3
    assert kl(tuned, there) <= 2 * kl(base, without) + F16_FACTORS
    # And it is what was trained: the tuned model's favourite continuation, there as here.
    assert llamacpp.greedy(smollm2_path, tokens[:-3], 3, adapter=adapter) == tokens[-3:]


@pytest.mark.parametrize(
    ("dtype", "largest_kl"), [("f32", 1e-9), ("f16", 1e-5), ("bf16", 1e-3), ("q8_0", 5e-3)]
)
@pytest.mark.parametrize("format", ["F32", "Q8_0"])
def test_an_export_runs_alone(
    workspace: Workspace,
    tiny_model: Callable[..., Path],
    llamacpp: LlamaCpp,
    format: str,
    dtype: str,
    largest_kl: float,
) -> None:
    model = tiny_model(format=format)
    retrograd("train", workspace.toml(model={"path": str(model)}, lora={"dtype": "f32"}))
    adapter, merged = workspace / "out" / "adapter.gguf", workspace / "merged.gguf"
    found = retrograd(
        "export", "--model", model, "--adapter", adapter, "--out", merged, "--type", dtype,
        "--device", "reference", "--modelfile",
    )  # fmt: skip
    printed = re.search(r"KL (\S+) nats a token on average, \S+ at most; top token agrees at", found.out)
    assert printed is not None
    assert float(printed[1]) < largest_kl
    assert (workspace / "merged.Modelfile").read_text().startswith("FROM ./merged.gguf\n")

    tuned, alone = ours(model, TOKENS, adapter), ours(merged, TOKENS)
    assert kl(tuned, alone) < largest_kl
    # llama.cpp rounds activations to the type of the weights; it is no further from us than for the base.
    there = llamacpp.next_token_logprobs(merged, TOKENS)
    slack = {"f32": 1e-11, "f16": F16_FACTORS, "bf16": 2e-3, "q8_0": 5e-3}[dtype]
    assert kl(alone, there) < slack


def test_a_gemma_export_keeps_its_tied_head(
    workspace: Workspace, tiny_model: Callable[..., Path], llamacpp: LlamaCpp
) -> None:
    model = tiny_model(architecture="gemma3")
    retrograd("train", workspace.toml(model={"path": str(model)}))
    adapter, merged = workspace / "out" / "adapter.gguf", workspace / "merged.gguf"
    retrograd("merge", "--model", model, "--adapter", adapter, "--out", merged, "--type", "f32")
    assert list(GGUFFile(merged).tensors) == list(GGUFFile(model).tensors)
    alone, there = ours(merged, TOKENS), llamacpp.next_token_logprobs(merged, TOKENS)
    base, without = ours(model, TOKENS), llamacpp.next_token_logprobs(model, TOKENS)
    assert kl(alone, there) <= 3 * kl(base, without)


# An architecture from another distribution.


def write_gemma2(path: Path, gemma3: Path, *, attention_cap: float, final_cap: float) -> Path:
    """A tiny gemma2 out of a tiny gemma3: other names, soft caps, no QK norms."""
    source = GGUFFile(gemma3)
    metadata: dict[str, Any] = {
        key.replace("gemma3.", "gemma2."): source.raw_metadata(key) for key in source.metadata
    }
    metadata["general.architecture"] = "gemma2"
    metadata["gemma2.attn_logit_softcapping"] = attention_cap
    metadata["gemma2.final_logit_softcapping"] = final_cap
    metadata["gemma2.rope.freq_base"] = 10000.0
    kept = [info for name, info in source.tensors.items() if "_q_norm" not in name and "_k_norm" not in name]
    tensors = [
        (TensorPlan(name=info.name, shape=info.shape, format=info.format), source.packed(info.name))
        for info in kept
    ]
    write_gguf(path, metadata, tensors)
    return path


@pytest.mark.parametrize(("attention_cap", "final_cap"), [(50.0, 30.0), (2.0, 4.0)])
def test_gemma2_of_a_third_party(
    workspace: Workspace,
    extras: None,
    tiny_model: Callable[..., Path],
    llamacpp: LlamaCpp,
    attention_cap: float,
    final_cap: float,
) -> None:
    source = tiny_model(architecture="gemma3", block_count=4)
    model = write_gemma2(workspace / "gemma2.gguf", source, attention_cap=attention_cap, final_cap=final_cap)
    base, without = ours(model, TOKENS), llamacpp.next_token_logprobs(model, TOKENS)
    assert kl(base, without) < 1e-5
    assert np.abs(base - without).max() < 0.05
    # The caps matter, else this would prove nothing about them.
    uncapped = write_gemma2(workspace / "uncapped.gguf", source, attention_cap=1e4, final_cap=1e4)
    assert kl(base, ours(uncapped, TOKENS)) > (1e-2 if final_cap < 5 else 1e-4)

    path = workspace.toml(
        model={"path": str(model)}, lora={"dtype": "f32"}, evaluation={"data": "heldout.jsonl"}
    )
    retrograd("train", path)
    assert workspace.held_out()[-1] < 0.7 * workspace.held_out()[0]
    adapter = workspace / "out" / "adapter.gguf"
    tuned = ours(model, TOKENS, adapter)
    there = llamacpp.next_token_logprobs(model, TOKENS, adapter=adapter)
    assert kl(tuned, there) <= 3 * kl(base, without)
