"""Adapter files: what is written is what stock llama.cpp applies, and what others wrote is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf import GGUFReader
from retrograd.gguf import open_model
from retrograd.gguf.adapter import Adapter, Factors, read_adapter, write_adapter
from retrograd.gguf.merge import merge_adapter
from retrograd.gguf.writer import TensorPlan, write_gguf
from retrograd.testing.models import ARCHITECTURES
from retrograd_hookspecs import ModelError, ModelFile
from tests.llamacpp.llamacpp import LlamaCpp, LlamaCppError

TinyModels = Callable[..., Path]
TOKENS = [5, 70, 71, 300, 12, 5, 44, 9, 120, 200, 33, 260]


def random_factors(model: ModelFile, rank: int = 4, scale: float = 0.05, seed: int = 0) -> Factors:
    """Factors for every projection of the blocks; B is `scale` times normal values."""
    rng = np.random.default_rng(seed)
    factors = {}
    for name, info in model.tensors.items():
        if name.startswith("blk.") and len(info.shape) == 2:
            rows, columns = info.shape
            a = rng.standard_normal((rank, columns)) / columns**0.5
            factors[name] = (
                a.astype(np.float32),
                (scale * rng.standard_normal((rows, rank))).astype(np.float32),
            )
    return factors


def write(path: Path, model: ModelFile, factors: Factors, **options: Any) -> Path:
    settings = {"architecture": model.architecture, "alpha": 8.0, "factors": factors, **options}
    write_adapter(path, **settings)
    return path


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_round_trip(tiny_model: TinyModels, tmp_path: Path, dtype: str) -> None:
    model = open_model(tiny_model())
    factors = random_factors(model)
    path = write(tmp_path / "a.gguf", model, factors, dtype=dtype, base_fingerprint=model.fingerprint())
    adapter = read_adapter(path)
    assert (adapter.alpha, adapter.rank, adapter.dtype) == (8.0, 4, dtype)
    assert adapter.architecture == "llama"
    assert adapter.check_base(model) == []
    assert list(adapter.factors) == list(factors)
    tolerance = {"f32": 0.0, "f16": 1e-3, "bf16": 8e-3}[dtype]
    for name, (a, b) in factors.items():
        for ours, theirs in zip(adapter.factors[name], (a, b), strict=True):
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-7 if tolerance else 0)
        assert adapter.scale(name) == 2.0
        np.testing.assert_allclose(adapter.delta(name, 1, 3), 2.0 * (b @ a)[1:3], rtol=0.02, atol=1e-3)


def test_the_file_holds_pairs_and_the_documented_keys_only(tiny_model: TinyModels, tmp_path: Path) -> None:
    model = open_model(tiny_model())
    path = write(tmp_path / "a.gguf", model, random_factors(model), extra_metadata={"general.name": "mine"})
    reader = GGUFReader(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.type"] == "adapter"
    assert values["general.architecture"] == "llama"
    assert values["general.name"] == "mine"
    assert values["adapter.type"] == "lora"
    assert values["adapter.lora.alpha"] == 8.0
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert {name.rsplit(".", 1)[1] for name in shapes} == {"lora_a", "lora_b"}
    # ggml counts dimensions from the innermost: (in, rank) and (rank, out).
    assert shapes["blk.0.ffn_down.weight.lora_a"] == [128, 4]
    assert shapes["blk.0.ffn_down.weight.lora_b"] == [4, 64]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llamacpp_applies_it_as_a_merge_does(
    architecture: str, tiny_model: TinyModels, tmp_path: Path, llamacpp: LlamaCpp
) -> None:
    base = tiny_model(architecture=architecture)
    model = open_model(base)
    path = write(tmp_path / "a.gguf", model, random_factors(model), dtype="f32")
    merged = tmp_path / "merged.gguf"
    merge_adapter(model, path, merged, dtype="f32")
    plain = llamacpp.logits(base, TOKENS)
    adapted = llamacpp.logits(base, TOKENS, adapter=path)
    assert np.abs(adapted - plain).max() > 0.05
    # llama.cpp looks GELU up in a table of F16 values, which turns rounding errors into larger steps.
    tolerance = 3e-3 if architecture == "gemma3" else 2e-4
    np.testing.assert_allclose(llamacpp.logits(merged, TOKENS), adapted, atol=tolerance)


def test_an_adapter_of_zeros_changes_nothing(
    tiny_model: TinyModels, tmp_path: Path, llamacpp: LlamaCpp
) -> None:
    base = tiny_model(architecture="qwen3")
    model = open_model(base)
    path = write(tmp_path / "a.gguf", model, random_factors(model, scale=0.0))
    np.testing.assert_array_equal(llamacpp.logits(base, TOKENS, adapter=path), llamacpp.logits(base, TOKENS))


def test_ranks_may_differ(tiny_model: TinyModels, tmp_path: Path, llamacpp: LlamaCpp) -> None:
    base = tiny_model()
    model = open_model(base)
    names, ranks = ("blk.0.attn_q.weight", "blk.1.ffn_up.weight"), (2, 8)
    factors = {
        name: random_factors(model, rank=rank, scale=0.3)[name]
        for name, rank in zip(names, ranks, strict=True)
    }
    adapter = read_adapter(write(tmp_path / "a.gguf", model, factors))
    assert dict(adapter.ranks) == {names[0]: 2, names[1]: 8}
    assert [adapter.scale(name) for name in names] == [4.0, 1.0]
    with pytest.raises(ModelError, match=r"different ranks: \[2, 8\]"):
        _ = adapter.rank
    merged = tmp_path / "merged.gguf"
    merge_adapter(model, adapter, merged, dtype="f32")
    adapted = llamacpp.logits(base, TOKENS, adapter=adapter.path)
    np.testing.assert_allclose(llamacpp.logits(merged, TOKENS), adapted, atol=2e-4)


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_real_models(
    fixture: str, request: pytest.FixtureRequest, shared_ref: Path, tmp_path: Path, llamacpp: LlamaCpp
) -> None:
    """A zero adapter changes nothing; a random one changes as the merged model does, within what llama.cpp's
    quantised activations blur (2 to 10e-3 nats)."""
    base: Path = request.getfixturevalue(fixture)
    model = open_model(base)
    reference = np.load(shared_ref / f"logits_{fixture.removesuffix('_path')}.npz")
    tokens = reference["p32.ids"][:8].tolist()
    zero = write(tmp_path / "zero.gguf", model, random_factors(model, scale=0.0))
    random = write(tmp_path / "random.gguf", model, random_factors(model, scale=0.005, rank=8), dtype="f16")
    plain = llamacpp.next_token_logprobs(base, tokens)
    np.testing.assert_array_equal(llamacpp.next_token_logprobs(base, tokens, adapter=zero), plain)
    adapted = llamacpp.next_token_logprobs(base, tokens, adapter=random)
    assert _divergence(adapted, plain) > 0.002
    report = merge_adapter(model, random, tmp_path / "merged.gguf", dtype="q8_0")
    assert report.merged == len(read_adapter(random).factors)
    assert report.notes == ()
    merged = llamacpp.next_token_logprobs(report.path, tokens)
    assert _divergence(adapted, merged) < 0.03


def _divergence(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def _file(path: Path, tensors: dict[str, np.ndarray[Any, Any]], **metadata: Any) -> Path:
    pairs = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    pairs |= {key.replace("__", "."): value for key, value in metadata.items()}
    entries = [(TensorPlan(name=n, shape=t.shape, format="F32"), t) for n, t in tensors.items()]
    write_gguf(path, {key: value for key, value in pairs.items() if value is not None}, entries)
    return path


A = np.ones((2, 64), np.float32)
B = np.ones((64, 2), np.float32)
PAIR = {"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B}


def test_without_alpha_the_scale_is_one_as_in_llamacpp(
    tiny_model: TinyModels, tmp_path: Path, llamacpp: LlamaCpp
) -> None:
    base = tiny_model()
    adapter = read_adapter(_file(tmp_path / "a.gguf", {key: 0.1 * value for key, value in PAIR.items()}))
    assert (adapter.alpha, adapter.scale("blk.0.attn_q.weight")) == (0.0, 1.0)
    merged = tmp_path / "merged.gguf"
    merge_adapter(open_model(base), adapter, merged, dtype="f32")
    adapted = llamacpp.logits(base, TOKENS, adapter=adapter.path)
    np.testing.assert_allclose(llamacpp.logits(merged, TOKENS), adapted, atol=2e-4)


def test_files_of_others(tmp_path: Path, tiny_model: TinyModels, llamacpp: LlamaCpp) -> None:
    norm = {**PAIR, "blk.0.attn_norm.weight": np.ones(64, np.float32)}
    adapter = read_adapter(_file(tmp_path / "norm.gguf", norm, adapter__lora__alpha=4.0))
    assert adapter.notes == ("norm.gguf: blk.0.attn_norm.weight is not applied (neither does llama.cpp)",)
    stray = {**PAIR, "rope_freqs.weight": np.ones(8, np.float32)}
    path = _file(tmp_path / "stray.gguf", stray, adapter__lora__alpha=4.0)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is neither a \.lora_a nor a \.lora_b"):
        read_adapter(path)
    with pytest.raises(LlamaCppError):
        llamacpp.logits(tiny_model(), TOKENS, adapter=path)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"blk.0.attn_q.weight.lora_a": A}, {}, r"attn_q\.weight\.lora_b is missing"),
        ({}, {}, "holds no tensors"),
        (PAIR, {"general__type": "model"}, "not a LoRA adapter: general.type is 'model'"),
        (PAIR, {"adapter__type": None}, "adapter.type None"),
        (PAIR, {"adapter__alora__invocation_tokens": [1]}, "activated LoRA"),
        ({**PAIR, "blk.0.attn_q.weight.lora_b": np.ones((64, 3), np.float32)}, {}, "with the same rank"),
        (
            {**PAIR, "blk.0.attn_q.weight.lora_b": np.full_like(B, np.nan)},
            {},
            "128 values that are not finite",
        ),
    ],
)
def test_files_that_are_no_adapters(
    tmp_path: Path, tensors: dict[str, Any], metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_adapter(_file(tmp_path / "a.gguf", tensors, **metadata))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "q8_0"}, "'q8_0' is not one of f32, f16, bf16"),
        ({"factors": {}}, "check lora.targets"),
        (
            {"factors": {"token_embd.weight": (A, B)}},
            "embedding token_embd.weight cannot be in a LoRA adapter",
        ),
        ({"factors": {"x.weight": (A, np.full_like(B, np.inf))}}, "lower the learning rate"),
        ({"factors": {"x.weight": (A, A)}}, "with the same rank"),
        ({"factors": {"x.weight": (1e5 * A, B)}, "dtype": "f16"}, "outside the range of F16"),
        ({"extra_metadata": {"adapter.lora.alpha": 1.0}}, "adapter.lora.alpha is set by the adapter itself"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"architecture": "llama", "alpha": 1.0, "factors": {"x.weight": (A, B)}}
    with pytest.raises(ModelError, match=message):
        write_adapter(tmp_path / "a.gguf", **(settings | change))
    assert list(tmp_path.iterdir()) == []


def test_another_base_is_noticed(tiny_model: TinyModels, tmp_path: Path) -> None:
    model = open_model(tiny_model(seed=1))
    options = {"base_fingerprint": model.fingerprint()}
    adapter: Adapter = read_adapter(write(tmp_path / "a.gguf", model, random_factors(model), **options))
    (note,) = adapter.check_base(open_model(tiny_model(seed=2)))
    assert "was trained on another file" in note
    with pytest.raises(ModelError, match=r"for the architecture 'llama'.*is 'qwen2'"):
        adapter.check_base(open_model(tiny_model(architecture="qwen2")))
    with pytest.raises(ModelError, match=r"changes blk\.1\..*, which .* does not have"):
        adapter.check_base(open_model(tiny_model(block_count=1)))
    with pytest.raises(ModelError, match=r"\(128, 64\), that of .* \(256, 64\)"):
        adapter.check_base(open_model(tiny_model(feed_forward_length=256)))
