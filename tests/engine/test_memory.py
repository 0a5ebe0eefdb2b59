"""The memory estimate is what is really allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.engine import (
    EngineSettings,
    TrainingEngine,
    TrainingSequence,
    estimate_memory,
    plan_epoch,
    whole_sequence,
)
from retrograd.engine.memory import workspace_sizes
from retrograd_plugins.trainables._lora_adapter import LoraAdapter, initial_factors
from tests.model_support import build_backend, build_kernels, load_model, mean_nll


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 32},
        {"micro_batch": 8, "gradient_accumulation": 4},
        {"micro_batch": 8, "gradient_accumulation": 2, "kv_dtype": "f32"},
        {"micro_batch": 32, "gradient_checkpointing": True, "checkpoint_every_n_layers": 1},
        {"micro_batch": 32, "gradient_checkpointing": True, "checkpoint_dtype": "bf16"},
    ],
    ids=str,
)
def test_the_estimate_is_what_a_run_allocates(
    tiny_model: Callable[..., Path], device: str, architecture: str, settings: dict[str, Any]
) -> None:
    backend = build_backend(device)
    model = load_model(tiny_model(architecture=architecture), backend, build_kernels(backend))
    names = list(model.projections)
    adapter = LoraAdapter(
        model, factors=initial_factors(model, names, rank=4, seed=0), alpha=8.0, dtype="f16"
    )
    engine = TrainingEngine(model, adapter, EngineSettings(**settings))
    estimated = dict(workspace_sizes(model, engine.settings, longest=33))
    parts = dict(
        estimate_memory(model, adapter, engine.settings, longest=33, optimizer_bytes_per_parameter=8.0)
    )

    sequences = [
        whole_sequence(np.arange(length, dtype=np.int32)) for length in (33, settings["micro_batch"] + 1)
    ]
    for step in plan_epoch(
        [s.predicts for s in sequences],
        [0, 1],
        micro_batch=engine.settings.micro_batch,
        gradient_accumulation=engine.settings.gradient_accumulation,
    ):
        engine.train_step(step, sequences, mean_nll, 1.0)
    engine.log_probabilities(sequences)
    allocated = dict(model.workspace.sizes()) | {"rope/tables": model.rope_tables.nbytes()}
    assert estimated == allocated

    count = sum(p.value.size for p in adapter.parameters)
    assert parts["gradients"] == sum(p.grad.nbytes for p in adapter.parameters)
    assert parts["optimizer"] == 8 * count
    assert parts["adapter"] == sum(p.value.nbytes + p.weight.nbytes for p in adapter.parameters)
    assert parts["weights (mapped)"] == sum(info.bytes for info in model.file.tensors.values())
    assert sum(parts.values()) - sum(allocated.values()) == pytest.approx(
        parts["gradients"] + parts["optimizer"] + parts["adapter"] + parts["weights (mapped)"]
    )


@pytest.mark.parametrize("micro_batch", [8, 40])
@pytest.mark.parametrize("fanout", ["max", "auto", "off"])
def test_the_estimate_covers_steps_with_shared_prompts(
    tiny_model: Callable[..., Path], micro_batch: int, fanout: Any
) -> None:
    backend = build_backend("reference")
    model = load_model(tiny_model(), backend, build_kernels(backend))
    factors = initial_factors(model, list(model.projections), rank=4, seed=0)
    adapter = LoraAdapter(model, factors=factors, alpha=8.0, dtype="f16")
    settings = EngineSettings(micro_batch=micro_batch, shared_prefix_fanout=fanout)
    estimated = dict(workspace_sizes(model, settings, longest=33, families=True))
    engine = TrainingEngine(model, adapter, settings)
    sequences = []
    for number, length in enumerate((33, 20, 33, 25)):
        tokens = np.full(length, number, np.int32)
        tokens[:12] = 9
        trained = np.arange(length) >= 12
        sequences.append(TrainingSequence(tokens=tokens, trained=trained))
    engine.reserve(32, families=True)
    reserved = {name: size for name, size in model.workspace.sizes() if name.startswith("kv")}
    step = engine.plan(sequences, [[0, 1, 2, 3]])
    assert bool(step.branches) == (fanout != "off")
    engine.train_step(step, sequences, mean_nll, 1.0)
    engine.log_probabilities(sequences, [[0, 1, 2, 3]])
    allocated = dict(model.workspace.sizes()) | {"rope/tables": model.rope_tables.nbytes()}
    assert allocated == {name: estimated[name] for name in allocated}
    assert {name: size for name, size in allocated.items() if name.startswith("kv")} == reserved


def test_longer_passes_and_contexts_take_more(tiny_model: Callable[..., Path]) -> None:
    backend = build_backend("reference")
    model = load_model(tiny_model(), backend, build_kernels(backend))
    adapter = LoraAdapter(
        model, factors=initial_factors(model, list(model.projections), rank=4, seed=0), alpha=8.0, dtype="f16"
    )

    def total(longest: int, **settings: Any) -> dict[str, int]:
        return dict(
            estimate_memory(
                model, adapter, EngineSettings(**settings), longest=longest, optimizer_bytes_per_parameter=8
            )
        )

    assert total(64, micro_batch=64)["activations"] > 1.9 * total(64, micro_batch=32)["activations"]
    assert total(64, micro_batch=16)["key/value cache"] < total(128, micro_batch=16)["key/value cache"]
    assert "key/value cache" not in total(64, micro_batch=64)
    checkpointed = total(64, micro_batch=64, gradient_checkpointing=True, checkpoint_every_n_layers=1)
    assert checkpointed["activations"] < total(64, micro_batch=64)["activations"]
