"""The real models against values from an independent float64 implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from retrograd.engine import plan_epoch, whole_sequence
from retrograd.nn import CausalLM
from retrograd.testing.adapters import attach_factors
from tests.model_support import (
    build_backend,
    build_kernels,
    engine_for,
    load_model,
    mean_nll,
    reference_factors,
    relative_gap,
)


@attrs.frozen(eq=False)
class Case:
    model: CausalLM
    logits: Any
    gradients: Any


def load_case(name: str, path: Path, references: Path, backend: Any, kernels: Any) -> Case:
    return Case(
        model=load_model(path, backend, kernels),
        logits=np.load(references / f"logits_{name}.npz"),
        gradients=np.load(references / f"lora_grads_{name}.npz"),
    )


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest, shared_ref: Path) -> Case:
    backend = build_backend("reference")
    path = request.getfixturevalue(f"{request.param}_path")
    return load_case(request.param, path, shared_ref, backend, build_kernels(backend))


def logsumexp(logits: Any) -> Any:
    highest = logits.max(axis=1)
    return highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))


def check_logits(case: Case, *, tolerance: float, margin: float) -> None:
    """Logits, logsumexp and next-token losses of the prompt; the greedy continuation where it is clear."""
    with case.model.without_adapter():
        _check_base_logits(case, tolerance=tolerance, margin=margin)


def _check_base_logits(case: Case, *, tolerance: float, margin: float) -> None:
    references = case.logits
    ids, greedy = references["p32.ids"], references["p32.greedy"]
    engine = engine_for(case.model)
    logits = engine.logits(np.concatenate([ids, greedy[:-1]]).astype(np.int32))
    prompt = logits[: len(ids)]
    top = np.take_along_axis(prompt, references["p32.top_ids"].astype(np.int64), axis=1)
    np.testing.assert_allclose(top, references["p32.top_logits"], atol=tolerance, rtol=0)
    np.testing.assert_allclose(logsumexp(prompt), references["p32.logsumexp"], atol=tolerance, rtol=0)
    [logp] = engine.log_probabilities([whole_sequence(ids)])
    np.testing.assert_allclose(-logp, references["p32.nll"], atol=tolerance, rtol=0)
    clear = references["p32.greedy_margin"] > margin
    assert clear.mean() > 0.9
    assert (logits[len(ids) - 1 :].argmax(axis=1) == greedy)[clear].all()


def check_lora_gradients(case: Case, *, tolerance: float, loss_tolerance: float) -> None:
    references = case.gradients
    parameters = attach_factors(
        case.model, reference_factors(case.model), scale=float(references["alpha"] / references["rank"])
    )
    first = {p.name: p.value for p in parameters}
    np.testing.assert_array_equal(first["blk.0.attn_q.weight.a"], references["blk.0.attn_q.lora_a"])
    np.testing.assert_array_equal(first["blk.0.ffn_down.weight.b"], references["blk.0.ffn_down.lora_b"])
    sequence = whole_sequence(references["ids"].astype(np.int32))
    [step] = plan_epoch([sequence.predicts], [0], micro_batch=64, gradient_accumulation=1)
    stats = engine_for(case.model, micro_batch=64).train_step(step, [sequence], mean_nll, 64.0)
    assert stats.loss == pytest.approx(float(references["loss"]), abs=loss_tolerance)
    found = {p.name: np.asarray(p.grad, dtype=np.float64) for p in parameters}
    expected = {
        key.replace(".grad_", ".weight."): references[key] for key in references.files if ".grad_" in key
    }
    assert len(expected) == 3 * 7 * 2
    assert relative_gap(found, expected) < tolerance
    norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in found.values()))
    assert norm == pytest.approx(float(references["lora_grad_norm"]), rel=tolerance)


def test_logits_losses_and_greedy_continuation(case: Case) -> None:
    check_logits(case, tolerance=1e-10, margin=1e-6)


def test_lora_gradients(case: Case) -> None:
    # The references are stored as float32: that rounding is all that is left.
    check_lora_gradients(case, tolerance=1e-7, loss_tolerance=1e-11)
