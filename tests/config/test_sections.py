"""The shared sections: sound declarations, and the defaults of the user's reference."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import attrs
import pytest

from retrograd.config import (
    SHARED_SECTIONS,
    Document,
    TrainingConfig,
    class_faults,
    load_document,
    read_shared,
    structure,
)
from retrograd_hookspecs import key

from .test_seven_mistakes import FILE


@pytest.mark.parametrize("name", sorted(SHARED_SECTIONS))
def test_declarations_are_sound(name: str) -> None:
    assert class_faults(SHARED_SECTIONS[name]) == []


def test_faults_of_a_class() -> None:
    @attrs.frozen(kw_only=True)
    class Faulty:
        undocumented: int = key(1, doc=" ")
        out_of_bounds: float = key(2.0, maximum=1.0, doc="Number.")
        wrong_choice: Literal["a", "b"] = key("c", doc="Choice.")
        lonely: int = key(1, excluded_by="nothing", doc="Excluded.")
        required: int = key(doc="Required.")
        plain: int

    assert class_faults(Faulty) == [
        "plain: has neither key(...) nor a default, so no TOML can give it",
        "undocumented: has no documentation",
        "lonely: is excluded by nothing, which is no key",
        "the class has no docstring, which the schema shows for the table",
        "out_of_bounds: its own default is refused: must be at most 1, got 2.0",
        'wrong_choice: its own default is refused: must be "a" or "b", got "c"',
    ]


def test_defaults_of_training() -> None:
    assert attrs.asdict(TrainingConfig()) == {
        "trainable": "lora",
        "optimizer": "adamw",
        "lr": 0.0001,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "epochs": 1,
        "ctx": 128,
        "micro_batch": 32,
        "gradient_accumulation": 1,
        "threads": None,
        "generation_concurrency": None,
        "generation_batch": None,
        "shared_prefix_fanout": "auto",
        "fast_sampling_context": True,
        "kv_dtype": "f16",
        "gradient_checkpointing": False,
        "checkpoint_every_n_layers": 4,
        "checkpoint_dtype": "f32",
        "chunked_cross_entropy": True,
        "chunked_ce_tiles": 8,
        "chunked_ce_seq_chunk": 512,
        "master_weights": "auto",
        "require_gpu_resident": False,
        "max_gpu_duty_cycle": 1.0,
    }


@pytest.mark.parametrize(
    ("section", "good", "bad"),
    [
        ("training", {"lr": 0}, {"lr": -1e-9}),
        ("training", {"weight_decay": 1.0}, {"weight_decay": 1.0001}),
        ("training", {"threads": 1}, {"threads": 0}),
        ("training", {"shared_prefix_fanout": 2}, {"shared_prefix_fanout": 1}),
        ("training", {"chunked_ce_seq_chunk": 0}, {"chunked_ce_seq_chunk": -1}),
        ("training", {"max_gpu_duty_cycle": 1.0}, {"max_gpu_duty_cycle": 0.0}),
        ("training", {"max_grad_norm": 1e9}, {"max_grad_norm": 0.0}),
        ("training", {"kv_dtype": "f32"}, {"kv_dtype": "bf16"}),
        ("model", {"path": "hf:a/b.gguf"}, {"device": "cpu"}),
        ("model", {"path": "m", "device": "mine"}, {"path": "m", "device": 0}),
        ("output", {"path": "o", "kind": "trainable"}, {"path": "o", "kind": "full"}),
        ("evaluation", {"data": "e", "patience": 1}, {"data": "e", "patience": 0}),
        ("evaluation", {"data": "e", "min_delta": 0}, {"data": "e", "min_delta": -0.1}),
        ("checkpoint", {"directory": "c", "mode": "best_eval"}, {"directory": "c"}),
        ("metrics", {"sinks": ["csv"]}, {"sinks": "csv"}),
        ("observe", {"directory": "o", "max_text_chars": 0}, {"directory": "o", "every": 0}),
        ("reference", {"model": "r", "ctx": 2}, {"ctx": 2}),
        ("plugins", {"load": ["./hooks.py"]}, {"load": "./hooks.py"}),
    ],
)
def test_bounds(section: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    cls: type[Any] = SHARED_SECTIONS[section]
    for values, accepted in ((good, True), (bad, False)):
        value, problems = structure(cls, Document.from_values({section: values}).table(section))
        assert (value is not None) is accepted
        assert bool(problems) is not accepted


def test_reading_is_fast(parse: Callable[[str], Document]) -> None:
    read_shared(load_document(FILE))
    started = time.process_time()
    for _ in range(10):
        read_shared(load_document(FILE))
    assert (time.process_time() - started) / 10 < 0.1


def test_import_is_light() -> None:
    code = "import sys, retrograd.config; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "retrograd.config.structure" in loaded
    assert not loaded & {"numpy", "numba", "jsonschema", "click", "gguf"}
