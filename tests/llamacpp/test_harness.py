"""The llama.cpp harness itself: exact where it can be, and clear where llama.cpp refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.llamacpp import llamacpp as harness
from tests.llamacpp.llamacpp import LlamaCpp, LlamaCppError, find_or_install

TOKENS = [5, 70, 71, 300, 12, 5, 44, 9]


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_it_agrees_with_the_reference_values(
    name: str, shared_ref: Path, request: pytest.FixtureRequest, llamacpp: LlamaCpp
) -> None:
    reference = np.load(shared_ref / f"logits_{name}.npz")
    path: Path = request.getfixturevalue(f"{name}_path")
    logits = llamacpp.logits(path, reference["p32.ids"])
    top = np.take_along_axis(logits, reference["p32.top_ids"].astype(np.int64), axis=1)
    assert np.abs(top - reference["p32.top_logits"]).max() <= float(reference["p32.llamacpp_max_abs_diff"])
    tokens = json.loads((shared_ref / f"tokens_{name}.json").read_text())["items"]
    texts = [item["text"] for item in tokens]
    assert llamacpp.tokenize(path, texts) == [item["plain"] for item in tokens]
    assert llamacpp.tokenize(path, texts, special=True) == [item["special"] for item in tokens]


def test_results_do_not_depend_on_what_came_before(
    tiny_model: Callable[..., Path], llamacpp: LlamaCpp
) -> None:
    path, other = tiny_model(), tiny_model(architecture="qwen2")
    first = llamacpp.logits(path, TOKENS)
    llamacpp.logits(other, TOKENS)
    np.testing.assert_array_equal(llamacpp.logits(path, TOKENS), first)
    np.testing.assert_allclose(llamacpp.logits(path, TOKENS[:5]), first[:5], atol=1e-4)


def test_log_probabilities_are_normalised(tiny_model: Callable[..., Path], llamacpp: LlamaCpp) -> None:
    logprobs = llamacpp.next_token_logprobs(tiny_model(), TOKENS)
    np.testing.assert_allclose(np.exp(logprobs).sum(axis=1), 1.0, atol=1e-12)


def test_greedy_takes_the_most_likely_token(tiny_model: Callable[..., Path], llamacpp: LlamaCpp) -> None:
    path = tiny_model(architecture="qwen3")
    chosen = llamacpp.greedy(path, TOKENS, 6)
    logits = llamacpp.logits(path, [*TOKENS, *chosen[:-1]])
    assert logits[len(TOKENS) - 1 :].argmax(axis=1).tolist() == chosen


def test_refusals_and_crashes_are_told_and_survived(
    tiny_model: Callable[..., Path], tmp_path: Path, llamacpp: LlamaCpp
) -> None:
    with pytest.raises(LlamaCppError, match=r"no such file|ENOENT"):
        llamacpp.logits(tmp_path / "absent.gguf", TOKENS)
    # Two equal tokens fail an assertion in llama.cpp, which ends its process.
    broken = tiny_model(metadata={"tokenizer.ggml.tokens": ["same"] * 355})
    with pytest.raises(LlamaCppError, match=r"(?s)ended with status .*GGML_ASSERT"):
        llamacpp.logits(broken, TOKENS)
    assert llamacpp.logits(tiny_model(), TOKENS).shape == (8, 355)


def test_what_is_missing_is_told_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRAD_NODE_LLAMA", str(tmp_path))
    with pytest.raises(
        LlamaCppError, match=r"has no node_modules/node-llama-cpp; install it there with `npm"
    ):
        find_or_install(tmp_path)
    monkeypatch.delenv("RETROGRAD_NODE_LLAMA")
    monkeypatch.setattr(harness.shutil, "which", lambda name: None)
    with pytest.raises(LlamaCppError, match=r"npm is not on the PATH.*Install it"):
        find_or_install(tmp_path)
