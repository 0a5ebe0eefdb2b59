"""The strings of each reference file, whose token ids were recorded with llama-cpp-python 0.3.36."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest

from retrograd.gguf.reader import open_model
from retrograd.testing.tokenizers import TEXTS, check_tokenizer
from retrograd_plugins.tokenizers._base import VocabularyTokenizer
from retrograd_plugins.tokenizers.gpt2 import Gpt2Tokenizer
from retrograd_plugins.tokenizers.llama import LlamaTokenizer

CLASSES: dict[str, type[Gpt2Tokenizer] | type[LlamaTokenizer]] = {
    "smollm2": Gpt2Tokenizer,
    "gemma3": LlamaTokenizer,
}
SECONDS_TO_BUILD = {"smollm2": 0.5, "gemma3": 2.0}


@pytest.fixture(scope="module", params=CLASSES)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def metadata(model: str, request: pytest.FixtureRequest) -> Any:
    path: Path = request.getfixturevalue(f"{model}_path")
    return open_model(path).metadata


@pytest.fixture(scope="module")
def tokenizer(model: str, metadata: Any) -> VocabularyTokenizer:
    return CLASSES[model](metadata)


@pytest.fixture(scope="module")
def items(model: str, shared_ref: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((shared_ref / f"tokens_{model}.json").read_text())["items"]
    assert len(found) >= 100
    return found


def test_token_ids(tokenizer: VocabularyTokenizer, items: list[dict[str, Any]]) -> None:
    for item in items:
        text = item["text"]
        assert tokenizer.encode(text) == item["plain"], text
        assert tokenizer.encode(text, special=True) == item["special"], text
        assert tokenizer.encode(text, special=True, bos=True) == item["bos_special"], text


def test_bytes(model: str, tokenizer: VocabularyTokenizer, items: list[dict[str, Any]]) -> None:
    different = []
    for item in items:
        for kind in ("plain", "special"):
            if tokenizer.decode_bytes(item[kind]) != base64.b64decode(item[f"detok_{kind}_b64"]):
                different.append(item["text"])
    # llama-cpp-python 0.3.36 reads each token into 32 bytes and drops a longer one: the token for 64 spaces
    # came back as nothing. llama.cpp itself gives the 64 spaces, and so must this.
    assert different == ([" " * 64] * 2 if model == "smollm2" else [])
    if different:
        assert tokenizer.decode(tokenizer.encode(" " * 64)) == " " * 64


def test_contract(tokenizer: VocabularyTokenizer) -> None:
    check_tokenizer(tokenizer, TEXTS)


def test_builds_fast(model: str, metadata: Any) -> None:
    started = time.perf_counter()
    CLASSES[model](metadata)
    assert time.perf_counter() - started < SECONDS_TO_BUILD[model]
