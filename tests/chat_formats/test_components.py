"""Chat formats and tokenizers as plugins: built from what the run has, in the variant of its template."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import retrograd_plugins.chat_formats
import retrograd_plugins.tokenizers
from retrograd.testing.chat_formats import check_chat_format
from retrograd.testing.tokenizers import check_tokenizer
from retrograd.testing.vocabulary import byte_level_vocabulary, sentencepiece_vocabulary
from retrograd_hookspecs import BuildContext, DataError, NoConfig, ToolCall
from retrograd_plugins.chat_formats.hermes import HermesFormat


def modules(package: Any) -> list[str]:
    return [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]


def context(**services: Any) -> BuildContext:
    return BuildContext(config=None, base_dir=Path(), services=services)


@pytest.mark.parametrize("stem", modules(retrograd_plugins.chat_formats))
def test_every_chat_format_builds(stem: str) -> None:
    module = importlib.import_module(f"retrograd_plugins.chat_formats.{stem}")
    (component,) = module.retrograd_chat_formats()
    assert component.name == stem
    assert component.source
    built = component.build(NoConfig(), context(template=SimpleNamespace(source="")))
    assert built.name == stem
    check_chat_format(built)


@pytest.mark.parametrize("stem", modules(retrograd_plugins.tokenizers))
def test_every_tokenizer_builds(stem: str) -> None:
    module = importlib.import_module(f"retrograd_plugins.tokenizers.{stem}")
    (component,) = module.retrograd_tokenizers()
    assert component.name == stem
    metadata = {"gpt2": byte_level_vocabulary("qwen2"), "llama": sentencepiece_vocabulary()}[stem]
    check_tokenizer(component.build(NoConfig(), context(model_file=SimpleNamespace(metadata=metadata))))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_what_json_cannot_write_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="'hermes' cannot write the call of 'f'"):
        HermesFormat().format_calls((ToolCall(name="f", arguments={"a": value}),))
