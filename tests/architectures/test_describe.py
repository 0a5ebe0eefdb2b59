"""Descriptions read from metadata, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrograd.gguf import open_model
from retrograd_hookspecs import ArchitectureSpec, ModelError
from tests.model_support import architecture, build_backend, build_kernels, load_model


def described(make: Callable[..., Path], name: str, **metadata: Any) -> ArchitectureSpec:
    file = open_model(make(architecture=name, metadata=metadata))
    return architecture(name).describe(file)


def test_real_models(smollm2_path: Path, gemma3_path: Path) -> None:
    llama = architecture("llama").describe(open_model(smollm2_path))
    assert (llama.block_count, llama.head_count, llama.head_count_kv, llama.head_length) == (30, 9, 3, 64)
    assert (llama.vocabulary_size, llama.tied_head, llama.rope_interleaved) == (49152, True, True)
    assert {block.rope_base for block in llama.blocks} == {100000.0}
    gemma = architecture("gemma3").describe(open_model(gemma3_path))
    assert (gemma.head_length, gemma.qk_norm, gemma.post_norms) == (256, True, True)
    assert gemma.embedding_scale == 640**0.5
    assert [index for index, block in enumerate(gemma.blocks) if not block.window] == [5, 11, 17]
    assert {(block.window, block.rope_base) for block in gemma.blocks} == {(512, 1e4), (0, 1e6)}


def test_gemma3_scales_positions_of_blocks_without_a_window_alone(tiny_model: Callable[..., Path]) -> None:
    spec = described(
        tiny_model, "gemma3", **{"gemma3.rope.scaling.factor": 8.0, "gemma3.rope.freq_base_swa": 20000.0}
    )
    assert {(b.window, b.rope_base, b.rope_scale) for b in spec.blocks} == {(8, 2e4, 1.0), (0, 1e6, 8.0)}


def test_gemma3_patterns_of_windows(tiny_model: Callable[..., Path]) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    assert [b.window for b in described(tiny_model, "gemma3", **{key: 2}).blocks] == [8, 0, 8, 0, 8, 0, 8]
    listed = [False, True, True, False, True, True, True]
    blocks = described(tiny_model, "gemma3", **{key: listed}).blocks
    assert [bool(b.window) for b in blocks] == listed
    with pytest.raises(ModelError, match=r"sliding_window_pattern is .*, not a list of 7 entries"):
        described(tiny_model, "gemma3", **{key: [True, False]})


def test_gemma3_27b_scales_queries_by_the_width_of_a_head(tiny_model: Callable[..., Path]) -> None:
    assert described(tiny_model, "gemma3").attention_scale == 0.0
    spec = described(tiny_model, "gemma3", **{"gemma3.block_count": 62})
    assert spec.attention_scale == (64 / 4) ** -0.5


def test_llama_windows_and_factors(tiny_model: Callable[..., Path]) -> None:
    spec = described(tiny_model, "llama", **{"llama.attention.sliding_window": 12})
    assert {block.window for block in spec.blocks} == {12}
    file = open_model(tiny_model(architecture="llama", rope_factors=True))
    factors = architecture("llama").describe(file).blocks[0].rope_factors
    assert len(factors) == 8
    assert factors == tuple(file.vector("rope_freqs.weight").tolist())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_rope_scaling_that_is_not_linear_is_refused(name: str, tiny_model: Callable[..., Path]) -> None:
    def scaled(kind: str, factor: float) -> ArchitectureSpec:
        return described(
            tiny_model, name, **{f"{name}.rope.scaling.type": kind, f"{name}.rope.scaling.factor": factor}
        )

    with pytest.raises(ModelError, match=r"rope\.scaling\.type = 'yarn' with factor 4\.0: only linear"):
        scaled("yarn", 4.0)
    assert scaled("yarn", 1.0).blocks[-1].rope_scale == 1.0
    assert scaled("none", 4.0).blocks[-1].rope_scale == 1.0
    assert next(b.rope_scale for b in scaled("linear", 4.0).blocks if not b.window) == 4.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 8, "llama.expert_count = 8: a mixture of experts is not supported"),
        ("logit_scale", 0.5, "llama.logit_scale = 0.5: a scale of the logits is not supported"),
        ("attention.causal", False, "llama.attention.causal is False, not a causal decoder"),
        (
            "attention.head_count_kv",
            3,
            "llama.attention.head_count_kv is 3, not a divisor of the 4 query heads",
        ),
        ("attention.value_length", 32, r"value_length is 32, not equal to llama.attention.key_length \(16\)"),
        (
            "rope.dimension_count",
            18,
            "llama.rope.dimension_count is 18, not an even number up to the head size 16",
        ),
        ("block_count", -1, "llama.block_count is -1, not a positive integer"),
        ("feed_forward_length", [128, 256], r"feed_forward_length differs between blocks \(\[128, 256\]\)"),
        ("attention.layer_norm_rms_epsilon", 0.0, "layer_norm_rms_epsilon is 0.0, not a positive number"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    key: str, value: Any, message: str, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(ModelError, match=message):
        described(tiny_model, "llama", **{f"llama.{key}": value})


def test_a_missing_key_is_named(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"the metadata lacks qwen2\.block_count, which is needed"):
        described(tiny_model, "qwen2", **{"qwen2.block_count": None})


def test_tensors_that_nothing_reads_are_refused(tiny_model: Callable[..., Path]) -> None:
    """A qwen3 file that claims to be qwen2-like would lose its norms silently."""
    backend = build_backend("reference")
    path = tiny_model(architecture="llama", metadata={"llama.block_count": 1}, block_count=2)
    with pytest.raises(ModelError, match=r"does not use the tensors blk\.1\.\w+\.weight.* and \d+ more"):
        load_model(path, backend, build_kernels(backend))


def test_tensors_of_another_shape_are_refused(tiny_model: Callable[..., Path]) -> None:
    backend = build_backend("reference")
    path = tiny_model(architecture="llama", metadata={"llama.feed_forward_length": 96})
    with pytest.raises(
        ModelError, match=r"blk\.0\.ffn_gate\.weight is 128 × 64, the metadata asks for 96 × 64"
    ):
        load_model(path, backend, build_kernels(backend))
    path = tiny_model(architecture="llama", metadata={"llama.block_count": 3})
    with pytest.raises(ModelError, match=r"there is no tensor blk\.2\."):
        load_model(path, backend, build_kernels(backend))
