"""Grammars of tool calls: whatever tokens a mask lets through, the format's own parser reads the calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrograd.agent.constrained import has_grammar
from retrograd.gguf import open_model
from retrograd.testing.grammars import check_grammar
from retrograd.testing.vocabulary import byte_level_vocabulary, sentencepiece_vocabulary
from retrograd_plugins.chat_formats.deepseek import DeepSeekFormat
from retrograd_plugins.chat_formats.granite import GraniteFormat
from retrograd_plugins.chat_formats.hermes import HermesFormat
from retrograd_plugins.chat_formats.llama3_json import Llama3JsonFormat
from retrograd_plugins.chat_formats.mistral import MistralFormat
from retrograd_plugins.chat_formats.prompt import PromptFormat
from retrograd_plugins.chat_formats.qwen3_coder import Qwen3CoderFormat
from retrograd_plugins.chat_formats.smollm3 import SmolLM3Format
from retrograd_plugins.constraints.llguidance import LlguidanceEngine
from retrograd_plugins.tokenizers.gpt2 import Gpt2Tokenizer
from retrograd_plugins.tokenizers.llama import LlamaTokenizer

from .test_round_trip import EVERY

GRAMMARS = {
    "hermes": HermesFormat(),
    "prompt": PromptFormat(),
    "smollm3": SmolLM3Format(),
    "llama3_json": Llama3JsonFormat(),
    "mistral": MistralFormat(),
    "mistral-args": MistralFormat("[TOOL_CALLS]name[ARGS]"),
    "mistral-ids": MistralFormat("[TOOL_CALLS]name[CALL_ID]0[ARGS]"),
    "deepseek": DeepSeekFormat(),
    "deepseek-fenced": DeepSeekFormat("```json"),
    "granite": GraniteFormat(),
    "granite-closed": GraniteFormat("<|tool_call|><|/tool_call|>"),
    "qwen3_coder": Qwen3CoderFormat(),
}
FORMATS = pytest.mark.parametrize("chat_format", GRAMMARS.values(), ids=GRAMMARS)


@pytest.fixture(scope="module")
def byte_level() -> Gpt2Tokenizer:
    return Gpt2Tokenizer(byte_level_vocabulary("qwen2"))


@pytest.fixture(scope="module")
def engine(byte_level: Gpt2Tokenizer) -> LlguidanceEngine:
    return LlguidanceEngine(byte_level)


@FORMATS
def test_random_turns(chat_format: Any, engine: LlguidanceEngine, byte_level: Gpt2Tokenizer) -> None:
    check_grammar(chat_format, engine, byte_level)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_random_turns_in_sentence_pieces(name: str) -> None:
    tokenizer = LlamaTokenizer(sentencepiece_vocabulary())
    check_grammar(GRAMMARS[name], LlguidanceEngine(tokenizer), tokenizer, walks=2)


def test_random_turns_in_the_vocabulary_of_a_model(smollm2_path: Path) -> None:
    tokenizer = Gpt2Tokenizer(open_model(smollm2_path).metadata)
    engine = LlguidanceEngine(tokenizer)
    for name in ("hermes", "mistral", "qwen3_coder"):
        check_grammar(GRAMMARS[name], engine, tokenizer, walks=1)


def test_which_formats_have_a_grammar() -> None:
    """Those whose calls are Python, or have a notation of their own, have none."""
    without = {name for name, chat_format in EVERY.items() if not has_grammar(chat_format)}
    assert without == {
        *("llama3_pythonic", "lfm2", "functionary", "functionary-element"),
        *("gemma", "gemma-function", "gemma-4"),
    }
    assert {f.name for f in GRAMMARS.values()} == {f.name for n, f in EVERY.items() if n not in without}
