"""Conversations on the real models' tokenizers: SmolLM2's own template, Gemma's turns on Gemma 3."""

from __future__ import annotations

import json
from pathlib import Path

from retrograd.audit import audit_examples, describe_masks
from retrograd.gguf import open_model
from retrograd_plugins.datasets.jsonl import ChatDataset
from retrograd_plugins.datasets.text import TextDataset
from retrograd_plugins.tokenizers.gpt2 import Gpt2Tokenizer
from retrograd_plugins.tokenizers.llama import LlamaTokenizer

from .standins import StandInFormat, StandInTemplate, template

RECORD = {
    "messages": [
        {"role": "user", "content": "Où est\n\nle café?"},
        {"role": "assistant", "content": "\n\nÀ gauche.\n"},
        {"role": "user", "content": "Merci"},
        {"role": "assistant", "content": "De rien!"},
    ]
}


def write(tmp_path: Path, *records: object) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_smollm2(smollm2_path: Path, tmp_path: Path) -> None:
    metadata = open_model(smollm2_path).metadata
    tokenizer = Gpt2Tokenizer(metadata)
    chat = StandInTemplate(metadata["tokenizer.chat_template"])
    dataset = ChatDataset(tokenizer, chat, StandInFormat())
    examples = dataset.load(write(tmp_path, RECORD), ctx=512)
    (example,) = examples
    head = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert describe_masks(example, tokenizer).split("\n", 1)[1] == (
        f"<|im_start|>system\n{head}<|im_end|>\n<|im_start|>user\nOù est\n\nle café?<|im_end|>\n"
        "<|im_start|>assistant\n⟦\n\nÀ gauche.\n<|im_end|>⟧\n<|im_start|>user\nMerci<|im_end|>\n"
        "<|im_start|>assistant\n⟦De rien!<|im_end|>⟧"
    )
    # As one text, "assistant\n" and "\n\nÀ" share the token "\n\n\n"; a rollout never samples half of it.
    im_start, im_end, newline = 1, 2, tokenizer.encode("\n")[0]
    first = int(example.trained.argmax())
    prompt = chat.render([], add_generation_prompt=True)
    assert example.tokens[first - len(tokenizer.encode(prompt, special=True))] == im_start
    assert example.tokens[first - 1] == newline
    assert example.tokens[first:].tolist()[: len(tokenizer.encode("\n\nÀ gauche.\n"))] == tokenizer.encode(
        "\n\nÀ gauche.\n"
    )
    assert example.tokens[-1] == im_end
    assert {f.level for f in audit_examples(examples, tokenizer, ctx=64, chat=True)} == {"ok"}


def test_gemma3(gemma3_path: Path, tmp_path: Path) -> None:
    """The base model has no template; its tokenizer has the tokens of Gemma's turns and asks for BOS."""
    metadata = open_model(gemma3_path).metadata
    tokenizer = LlamaTokenizer(metadata)
    dataset = ChatDataset(tokenizer, template("gemma", "<bos>"), StandInFormat())
    examples = dataset.load(write(tmp_path, RECORD), ctx=512)
    shown = describe_masks(examples[0], tokenizer).split("\n", 1)[1]
    assert shown == (
        "<bos><start_of_turn>user\nOù est\n\nle café?<end_of_turn>\n<start_of_turn>model\n"
        "⟦À gauche.<end_of_turn>⟧\n<start_of_turn>user\nMerci<end_of_turn>\n<start_of_turn>model\n"
        "⟦De rien!<end_of_turn>⟧"
    )
    assert any("white space around an assistant turn" in note for note in dataset.notes())
    assert examples[0].tokens.tolist().count(tokenizer.bos_id) == 1
    assert {f.level for f in audit_examples(examples, tokenizer, ctx=64, chat=True)} == {"ok"}


def test_gemma3_text(gemma3_path: Path, tmp_path: Path) -> None:
    tokenizer = LlamaTokenizer(open_model(gemma3_path).metadata)
    text = "Voilà, un café.\n日本語\n" * 50
    path = tmp_path / "corpus.txt"
    path.write_text(text)
    windows = TextDataset(tokenizer).load(path, ctx=64)
    assert windows[0].tokens[0] == tokenizer.bos_id
    trained = [token for window in windows for token in window.tokens[window.trained].tolist()]
    assert tokenizer.decode(trained) == text
