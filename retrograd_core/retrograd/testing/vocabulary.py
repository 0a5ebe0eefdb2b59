"""Small complete vocabularies: byte-level BPE and SentencePiece, every byte encodable."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.constants import TokenType

# Merges of byte-level BPE in rank order; each side is a byte or made by an earlier line. Ġ is a space.
_MERGES = """
Ġ t|h e|i n|r e|Ġ a|o n|e r|Ġt he|n d|a t|Ġ s|e n|o r|i s|Ġ w|in g|e s|Ġ c|o u|i t|a n|Ġ o|Ġ p|Ġa nd|e d|Ġ b
a r|Ġ f|Ġ in|Ġ m|l l|Ġt o|Ġo f|a l|Ġ d|Ġ i|i c|o m|Ġ h|u t|Ġ is|c t|l e|Ġ y|Ġy ou|ou r|Ġy our|v er|Ġ n|o t
Ġn ot|s t|o w|h at|Ġw hat|e ll|Ġ he|o l|a y|H ell|Hell o|w or|l d|wor ld|Ġ wor|Ġwor ld|u s|er s|a s|Ġ as
s er|us er|as s|is t|ass ist|an t|assist ant|s y|st e|sy ste|syste m|i on|a m|Ġ 1|Ġ 2|1 0|0 0
Ċ Ċ|. Ċ|Ġ Ġ|ĠĠ ĠĠ
"""

# Pieces of the SentencePiece model, best first; each is two earlier pieces or characters put together.
_PIECES = """
▁t he in re ▁a on er ▁the nd at ▁s en or is ▁w ing es ▁c ou it an ▁o ▁p ▁and ed ▁b ar ▁f ▁in ▁m ll
▁to ▁of al ▁d ▁i ic om ▁h ut ▁is ct le ▁y ▁you our ver ▁n ot ▁not st ow hat ▁what ell ▁he ol ay Hell
Hello wor ld world ▁wor ▁world us ers as ser user mo de mode model del sy ste syste system ion am ▁▁
▁▁▁▁ 10 00 the and ist ant ass assist assistant ▁user
"""

_BPE_SPECIALS = {
    "llama": ("<|begin_of_text|>", "<|end_of_text|>"),
    "qwen2": ("<|endoftext|>",),
    "qwen3": ("<|endoftext|>",),
}
_CHAT_SPECIALS = ("<|im_start|>", "<|im_end|>")
# Tool markers are whole tokens of the vocabulary but not control tokens, as in Qwen's.
_CHAT_ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")

CHATML_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Tools, one JSON schema a line:\\n<tools>\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{% endfor %}
{{- '</tools>\\nTo call one, answer\\n<tool_call>\\n{"name": ..., "arguments": {...}}' }}
{{- '\\n</tool_call><|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('a system message comes first') }}{% endif %}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

GEMMA_TEMPLATE = """\
{{- bos_token }}
{%- set lead = namespace(text='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- set lead.text = message.content + '\\n\\n' %}
{%- elif message.role == 'assistant' %}
{{- '<start_of_turn>model\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- else %}
{{- '<start_of_turn>user\\n' + lead.text + message.content | trim + '<end_of_turn>\\n' }}
{%- set lead.text = '' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}
"""


def byte_level_vocabulary(architecture: str) -> dict[str, Any]:
    """Tokenizer metadata of a byte-level BPE: 256 bytes, merges, special and chat tokens.

    llama puts BOS first (`pre` "llama-bpe"); qwen2 and qwen3 do not (`pre` "qwen2").
    """
    merges = [merge for line in _MERGES.splitlines() for merge in line.split("|") if merge]
    ordinary = [_printable_bytes()[byte] for byte in range(256)]
    ordinary += [merge.replace(" ", "") for merge in merges]
    specials = (*_BPE_SPECIALS[architecture], *_CHAT_SPECIALS)
    tokens = [*ordinary, *specials, *_CHAT_ADDED]
    types = [TokenType.NORMAL] * len(ordinary) + [TokenType.CONTROL] * len(specials)
    types += [TokenType.USER_DEFINED] * len(_CHAT_ADDED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe" if architecture == "llama" else "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index(specials[0]),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index(_BPE_SPECIALS[architecture][-1]),
        "tokenizer.ggml.add_bos_token": architecture == "llama",
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """Tokenizer metadata of a SentencePiece model with byte fallback, laid out as Gemma's."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    added = ["\n", "\n\n"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = _PIECES.split()
    characters = ["▁", *(chr(code) for code in range(0x21, 0x7F)), "é", "ü", "ß", "日", "本"]
    tokens = [*specials, *added, *byte_tokens, *pieces, *characters]
    types = [TokenType.CONTROL] * len(specials)
    types[3] = TokenType.UNKNOWN
    types += [TokenType.USER_DEFINED] * len(added) + [TokenType.BYTE] * 256
    types += [TokenType.NORMAL] * (len(pieces) + len(characters))
    fixed = len(specials) + len(added) + 256
    scores = [-1000.0] * len(specials) + [-1000.0] * len(added) + [0.0] * 256
    scores += [-float(rank) for rank in range(len(tokens) - fixed)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": tokens.index("<end_of_turn>"),
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _printable_bytes() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: GPT-2's encoder: printable Latin-1 stands for itself, the rest moves to 256 and up.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in shown}
    moved = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(256 + index) for index, byte in enumerate(moved)}
