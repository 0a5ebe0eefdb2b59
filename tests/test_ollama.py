"""Modelfiles: the right family, checked against the model's own template, stops and context.

Each Go template was compared with its `Family.write` by Go's own `text/template`; here the Python form is
compared with Jinja.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jinja2
import pytest

from retrograd.gguf import open_model
from retrograd.ollama import FAMILIES, detect_family, modelfile
from retrograd_hookspecs import Message, TokenizerError

TinyModels = Callable[..., Path]


@attrs.frozen
class JinjaTemplate:
    """The least that implements `ChatTemplate`."""

    source: str
    bos: str = ""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return jinja2.Template(self.source).render(
                messages=turns, add_generation_prompt=add_generation_prompt, bos_token=self.bos
            )
        except jinja2.UndefinedError as error:
            raise TokenizerError(str(error)) from error


LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set n = namespace(s='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set n.s = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}[INST] {{ n.s + m.content }} [/INST]{% set n.s = '' %}"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("architecture", "source", "family"),
    [
        ("llama", None, "ChatML"),
        ("gemma3", None, "Gemma"),
        ("llama", LLAMA3, "Llama 3"),
        ("llama", PHI, "Phi"),
        ("llama", MISTRAL, "Mistral"),
    ],
)
def test_each_family_is_found_and_agrees_with_its_jinja_template(
    architecture: str, source: str | None, family: str, tiny_model: TinyModels
) -> None:
    model = open_model(tiny_model(architecture=architecture, chat_template=source))
    jinja = model.metadata["tokenizer.chat_template"]
    bos = model.metadata["tokenizer.ggml.tokens"][model.metadata["tokenizer.ggml.bos_token_id"]]
    text = modelfile(model, "m.gguf", template=JinjaTemplate(jinja, bos))
    (go,) = [entry.go for entry in FAMILIES if entry.name == family]
    assert text.startswith("FROM ./m.gguf\n")
    assert f"# {family} turns, checked against the GGUF's own template" in text
    assert f'TEMPLATE """{go}"""\n' in text
    assert "SYSTEM" not in text


def test_real_model_gets_its_default_system_prompt(smollm2_path: Path) -> None:
    model = open_model(smollm2_path)
    text = modelfile(model, "m.gguf", template=JinjaTemplate(model.metadata["tokenizer.chat_template"]))
    assert "# ChatML turns, checked" in text
    assert 'SYSTEM "You are a helpful AI assistant named SmolLM, trained by Hugging Face"\n' in text
    assert 'PARAMETER stop "<|im_end|>"\n' in text
    assert "PARAMETER num_ctx 8192\n" in text


def test_a_template_that_differs_is_left_to_ollama(tiny_model: TinyModels) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    model = open_model(tiny_model(chat_template=source))
    text = modelfile(model, "m.gguf", template=JinjaTemplate(source))
    assert (
        "No TEMPLATE: the GGUF's own template does not write plain ChatML turns ('<|im_start|>user: A" in text
    )
    assert 'TEMPLATE "' not in text
    refusing = "{{ messages[0].no.such }}<|im_start|><|im_end|>"
    text = modelfile(model, "m.gguf", template=JinjaTemplate(refusing))
    assert "No TEMPLATE: the GGUF's own template refuses an ordinary conversation" in text


def test_unknown_and_absent_templates(tiny_model: TinyModels) -> None:
    none = modelfile(open_model(tiny_model(chat_template="")), "m.gguf")
    assert "# No TEMPLATE: the GGUF has no chat template." in none
    unknown = modelfile(open_model(tiny_model(chat_template="{{ messages }}")), "m.gguf")
    assert "# No TEMPLATE: the chat template is of no family known here." in unknown
    assert detect_family("<|im_start|>user<|im_sep|>hi<|im_end|>") is None


def test_stops_context_and_quoting(tiny_model: TinyModels) -> None:
    model = open_model(tiny_model(architecture="gemma3"))
    text = modelfile(model, "my model.gguf")
    assert text.startswith('FROM "./my model.gguf"\n')
    assert 'PARAMETER stop "<end_of_turn>"\nPARAMETER stop "<eos>"\n' in text
    assert "allows up to 512 tokens" in text
    assert "PARAMETER num_ctx 512\n" in text
    text = modelfile(model, "m.gguf", stops=['say "stop"'], num_ctx=64)
    assert 'PARAMETER stop """say "stop""""\n' in text
    assert "<eos>" not in text
    assert text.endswith("PARAMETER num_ctx 64\n")
