"""Tiny models are valid: stock llama.cpp loads and runs them, the same arguments give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.testing.models import ARCHITECTURES, write_tiny_model
from tests.llamacpp.llamacpp import LlamaCpp

TOKENS = [5, 70, 71, 300, 12, 5, 44, 9, 120, 200, 33, 260]


@pytest.mark.parametrize(
    "options",
    [
        *({"architecture": name} for name in ARCHITECTURES),
        {"architecture": "llama", "rope_factors": True},
        {"architecture": "llama", "tied_head": False},
        {"architecture": "qwen3", "tied_head": True},
        *({"architecture": "llama", "format": name} for name in ("F16", "BF16", "Q8_0", "Q4_0", "Q5_1")),
        *(
            {
                "architecture": "gemma3",
                "format": name,
                "embedding_length": 256,
                "feed_forward_length": 256,
                "head_length": 64,
                "block_count": 2,
            }
            for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ1_M", "IQ2_XXS")
        ),
    ],
    ids=lambda options: "-".join(str(value) for value in list(options.values())[:2]),
)
def test_llamacpp_runs_it_and_its_logits_are_well_spread(
    options: dict[str, Any], tiny_model: Callable[..., Path], llamacpp: LlamaCpp
) -> None:
    logits = llamacpp.logits(tiny_model(**options), TOKENS)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std(axis=1).mean() < 8.0
    best = np.exp(logits.max(axis=1)) / np.exp(logits.astype(np.float64)).sum(axis=1)
    assert best.mean() < 0.9


def test_rope_factors_change_the_result(tiny_model: Callable[..., Path], llamacpp: LlamaCpp) -> None:
    plain = llamacpp.logits(tiny_model(architecture="llama"), TOKENS)
    scaled = llamacpp.logits(tiny_model(architecture="llama", rope_factors=True), TOKENS)
    assert np.abs(plain - scaled)[-1].max() > 1e-3


def test_gemma_window_limits_what_is_seen(tiny_model: Callable[..., Path], llamacpp: LlamaCpp) -> None:
    narrow = llamacpp.logits(tiny_model(architecture="gemma3", sliding_window=4), TOKENS)
    wide = llamacpp.logits(tiny_model(architecture="gemma3", sliding_window=64), TOKENS)
    np.testing.assert_allclose(narrow[:4], wide[:4], atol=1e-4)
    assert np.abs(narrow - wide)[-1].max() > 1e-2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_byte_can_be_encoded(
    architecture: str, tiny_model: Callable[..., Path], llamacpp: LlamaCpp
) -> None:
    path = tiny_model(architecture=architecture)
    texts = ["Hello world, what is your name?\n\n", "naïve 日本 ½ \t\x01 1234", "the assistant and the user"]
    tokens = llamacpp.tokenize(path, texts)
    assert llamacpp.detokenize(path, tokens) == texts
    assert max(len(row) / len(text.encode()) for row, text in zip(tokens, texts, strict=True)) <= 1.0
    assert len(tokens[2]) < len(texts[2]) / 2


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "a.gguf", architecture="qwen3", format="Q4_0", seed=3)
    second = write_tiny_model(tmp_path / "b.gguf", architecture="qwen3", format="Q4_0", seed=3)
    other = write_tiny_model(tmp_path / "c.gguf", architecture="qwen3", format="Q4_0", seed=4)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'falcon' is not one of llama, gemma3, qwen2, qwen3"):
        write_tiny_model(tmp_path / "a.gguf", architecture="falcon")
