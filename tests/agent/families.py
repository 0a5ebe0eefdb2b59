"""Chat templates in the manner of each family of models, for whole rollouts with its chat format.

They are written for these tests: what matters is where turns begin and end, how calls and observations are
framed, and what each family does to turns that were given before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from gguf.constants import TokenType

from retrograd.testing.vocabulary import byte_level_vocabulary

from .support import SMALL

SLOTS = 8
"""Special tokens of a tiny llama's vocabulary, which a family's own take the place of."""


@attrs.frozen(kw_only=True)
class Family:
    """A template out of parts; each pair stands around the text of such a message."""

    format: str
    """Name of the chat format that such a template selects."""
    specials: tuple[str, ...]
    """BOS, the stop token, and other special tokens."""
    turn: tuple[str, str]
    user: tuple[str, str]
    system: tuple[str, str] = ("", "\n")
    observation: tuple[str, str]
    call: str
    """Jinja for one call `c`."""
    calls: tuple[str, str, str] = ("", "", "")
    """Before, between and behind calls."""
    hint: str = ""
    """Text of the system prompt that says how to call."""
    opening: str = ""
    """Further text of the generation prompt."""
    checks: str = ""
    """Jinja that comes first."""
    content: str = "m.content"
    """Jinja for the text of a turn that is given."""

    def source(self) -> str:
        """The template."""
        q = repr
        before, between, behind = self.calls
        return (
            f"{{{{- bos_token }}}}{self.checks}"
            "{%- set given = messages[0].content if messages[0].role == 'system' else '' -%}"
            f"{{%- if tools -%}}{{{{ {q(self.system[0])} + given + {q(self.hint)} }}}}"
            "{%- for t in tools -%}{{ t | tojson + '\\n' }}{%- endfor -%}"
            f"{{{{ {q(self.system[1])} }}}}"
            f"{{%- elif given -%}}{{{{ {q(self.system[0])} + given + {q(self.system[1])} }}}}{{%- endif -%}}"
            "{%- for m in messages -%}"
            f"{{%- if m.role == 'user' -%}}{{{{ {q(self.user[0])} + m.content + {q(self.user[1])} }}}}"
            f"{{%- elif m.role == 'tool' -%}}"
            f"{{{{ {q(self.observation[0])} + m.content + {q(self.observation[1])} }}}}"
            f"{{%- elif m.role == 'assistant' -%}}{{{{ {q(self.turn[0])} }}}}{{{{ {self.content} }}}}"
            f"{{%- if m.tool_calls -%}}{{{{ {q(before)} }}}}{{%- for t in m.tool_calls -%}}"
            f"{{%- set c = t.function -%}}{self.call}"
            f"{{%- if not loop.last -%}}{{{{ {q(between)} }}}}{{%- endif -%}}{{%- endfor -%}}"
            f"{{{{ {q(behind)} }}}}{{%- endif -%}}{{{{ {q(self.turn[1])} }}}}"
            "{%- endif -%}{%- endfor -%}"
            f"{{%- if add_generation_prompt -%}}{{{{ {q(self.turn[0] + self.opening)} }}}}{{%- endif -%}}"
        )

    def model(self, tiny_model: Callable[..., Path]) -> Path:
        """A tiny model of this family."""
        vocabulary = byte_level_vocabulary("llama")
        tokens: list[str] = list(vocabulary["tokenizer.ggml.tokens"])
        types = np.array(vocabulary["tokenizer.ggml.token_type"])
        rest = [f"<unused{n}>" for n in range(SLOTS - len(self.specials))]
        tokens[-SLOTS:] = [*self.specials, *rest]
        types[-SLOTS:] = TokenType.USER_DEFINED
        types[-SLOTS : -SLOTS + 2] = TokenType.CONTROL
        first = len(tokens) - SLOTS
        metadata: dict[str, Any] = {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": first,
            "tokenizer.ggml.eos_token_id": first + 1,
            "tokenizer.ggml.padding_token_id": first,
            "tokenizer.ggml.add_bos_token": True,
        }
        return tiny_model(**{**SMALL, "context_length": 4096}, chat_template=self.source(), metadata=metadata)


def _objects(arguments: str) -> str:
    return "{{ '{\"name\": ' + c.name | tojson + ', \"" + arguments + "\": ' + c.arguments | tojson + '}' }}"


_CHATML: dict[str, Any] = {
    "specials": ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"),
    "system": ("<|im_start|>system\n", "<|im_end|>\n"),
    "user": ("<|im_start|>user\n", "<|im_end|>\n"),
    "turn": ("<|im_start|>assistant\n", "<|im_end|>\n"),
    "observation": ("<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n"),
}
_LLAMA: dict[str, Any] = {
    "specials": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    "system": ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
    "user": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    "turn": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "observation": ("<|start_header_id|>ipython<|end_header_id|>\n\n", "<|eot_id|>"),
}
_ROLES: dict[str, Any] = {
    "system": ("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>\n"),
    "user": ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
    "turn": ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
    "observation": ("<|start_of_role|>tool_response<|end_of_role|>", "<|end_of_text|>\n"),
}
_ALTERNATION = (
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}"
    "{%- if m.role in ('user', 'assistant') and not m.tool_calls -%}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) -%}{{ raise_exception('roles alternate') }}{%- endif -%}"
    "{%- set ns.n = ns.n + 1 -%}{%- endif -%}{%- endfor -%}"
)
_LAST_USER = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
_WITHOUT_THOUGHT = "m.content.split('</think>')[-1].lstrip('\\n')"
_XML = (
    "{{ '<tool_call>\\n<function=' + c.name + '>\\n' }}{%- for k, v in c.arguments.items() -%}"
    "{{ '<parameter=' + k + '>\\n' + v | string + '\\n</parameter>\\n' }}{%- endfor -%}"
    "{{ '</function>\\n</tool_call>' }}"
)
_TAGGED = "{{ '<tool_call>\\n' }}" + _objects("arguments") + "{{ '\\n</tool_call>' }}"
_PYTHON = (
    "{{ c.name + '(' }}{%- for k, v in c.arguments.items() -%}{{ k + '=' + v | tojson }}"
    "{%- if not loop.last -%}{{ ', ' }}{%- endif -%}{%- endfor -%}{{ ')' }}"
)

FAMILIES: dict[str, Family] = {
    "hermes": Family(**_CHATML, format="hermes", call=_TAGGED, calls=("", "\n", "")),
    "qwen3": Family(
        **_CHATML,
        format="hermes",
        call=_TAGGED,
        calls=("", "\n", ""),
        checks=_LAST_USER,
        content=f"m.content if loop.index0 > ns.last else {_WITHOUT_THOUGHT}",
    ),
    "qwen3_coder": Family(
        **_CHATML,
        format="qwen3_coder",
        call=_XML,
        calls=("", "\n", ""),
        hint="call with <function=NAME> and <parameter=KEY>\n",
    ),
    "smollm3": Family(
        **_CHATML,
        format="smollm3",
        call="{{ '<tool_call>' }}" + _objects("arguments") + "{{ '</tool_call>' }}",
        calls=("", "\n", ""),
        hint="xml_tools or python_tools in <code>\n",
    ),
    "llama3_json": Family(**_LLAMA, format="llama3_json", call=_objects("parameters"), calls=("", "; ", "")),
    "llama3_pythonic": Family(
        **_LLAMA,
        format="llama3_pythonic",
        call=_PYTHON,
        calls=("[", ", ", "]"),
        hint="in the format of [func_name1(key=value)]\n",
    ),
    "functionary": Family(
        **_LLAMA,
        format="functionary",
        call="{{ '<function=' + c.name + '>' + c.arguments | tojson + '</function>' }}",
    ),
    "lfm2": Family(
        specials=(
            "<|startoftext|>",
            "<|im_end|>",
            "<|im_start|>",
            "<|tool_call_start|>",
            "<|tool_call_end|>",
        ),
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        turn=("<|im_start|>assistant\n", "<|im_end|>\n"),
        observation=("<|im_start|>tool\n<|tool_response_start|>", "<|tool_response_end|><|im_end|>\n"),
        format="lfm2",
        call=_PYTHON,
        calls=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    ),
    "granite": Family(
        **_ROLES,
        specials=("<|start|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        format="granite",
        call=_objects("arguments"),
        calls=("<|tool_call|>[", ", ", "]"),
    ),
    # Says nothing beside a call, and wants an observation to answer one.
    "mistral": Family(
        specials=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        system=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        user=("[INST]", "[/INST]"),
        turn=("", "</s>"),
        observation=('[TOOL_RESULTS] {"content": ', "}[/TOOL_RESULTS]"),
        format="mistral",
        call=_objects("arguments"),
        calls=("[TOOL_CALLS] [", ", ", "]"),
        content="'' if m.tool_calls else m.content",
        checks=_ALTERNATION,
    ),
    # The generation prompt opens a thought, and no thought of an earlier turn is repeated.
    "deepseek": Family(
        specials=(
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ),
        user=("<｜User｜>", ""),
        turn=("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        observation=("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        format="deepseek",
        call="{{ '<｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + c.arguments | tojson"
        " + '<｜tool▁call▁end｜>' }}",
        calls=("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        opening="<think>\n",
        content=_WITHOUT_THOUGHT,
    ),
    # A template that takes white space off turns and lets only two roles follow each other.
    "gemma": Family(
        specials=("<bos>", "<end_of_turn>", "<start_of_turn>"),
        user=("<start_of_turn>user\n", "<end_of_turn>\n"),
        turn=("<start_of_turn>model\n", "<end_of_turn>\n"),
        observation=("<start_of_turn>user\n```tool_output\n", "\n```<end_of_turn>\n"),
        format="gemma",
        call=_PYTHON,
        calls=("```tool_code\n", "\n", "\n```"),
        content="m.content | trim",
    ),
    "tools as text": Family(
        specials=("<s>", "<eot>", "<user>", "<model>"),
        user=("<user>", "\n"),
        turn=("<model>", "<eot>\n"),
        observation=("", ""),
        format="prompt",
        call="",
        checks="{%- if tools -%}{{ raise_exception('no tools here') }}{%- endif -%}",
        content="m.content | trim",
    ),
}


def names() -> Sequence[str]:
    """All families."""
    return list(FAMILIES)
