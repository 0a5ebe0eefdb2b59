"""Contract of architectures: what every description of a model must get right.

A third party runs it on a small model file of its architecture::

    check_architecture(MyArchitecture(), path, kernels=kernels, backend=backend)

with a float64 backend, since gradients are compared with finite differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrograd.engine import EngineSettings, TrainingEngine, TrainingSequence, plan_epoch, whole_sequence
from retrograd.gguf import open_model
from retrograd.nn import CausalLM
from retrograd_hookspecs import (
    Architecture,
    ArchitectureSpec,
    Backend,
    KernelTable,
    LossBatch,
    LossResult,
    ModelError,
    ModelFile,
    Parameter,
    QuantMatrix,
    TensorInfo,
)

from .adapters import attach_factors, random_factors

TOKENS = 23
"""Length of the test sequence: longer than the windows of tiny models."""


def check_architecture(
    architecture: Architecture, path: Path, *, kernels: KernelTable, backend: Backend
) -> None:
    """Run all checks on the model in `path`. Raises AssertionError with what is wrong."""
    if backend.compute_dtype != np.float64:
        raise ValueError(f"finite differences need float64, the backend computes in {backend.compute_dtype}")
    file = open_model(path)
    spec = architecture.describe(file)
    check_spec(spec)
    assert architecture.describe(file) == spec, "describe() gives another answer the second time"
    check_metadata(architecture, file, spec)
    model = CausalLM(file, spec, kernels, backend)
    tokens = _tokens(spec, TOKENS)
    check_causality(model, tokens)
    check_packing(model, tokens)
    check_gradients(model, tokens)


def check_spec(spec: ArchitectureSpec) -> None:
    """The numbers of a description fit each other."""
    assert len(spec.blocks) == spec.block_count, "one BlockStyle a block"
    assert spec.head_count % spec.head_count_kv == 0, "query heads are shared evenly"
    assert 0 < spec.rope_dimensions <= spec.head_length, "RoPE rotates at most the head"
    assert spec.rope_dimensions % 2 == 0, "RoPE rotates pairs"
    assert spec.activation in ("silu", "gelu_tanh"), f"unknown activation {spec.activation!r}"
    assert spec.norm_epsilon > 0, "the norm's epsilon is positive"
    for style in spec.blocks:
        assert style.window >= 0, "a window is 0 (none) or positive"
        assert style.rope_base > 1, "the base of RoPE exceeds 1"
        assert len(style.rope_factors) in (0, spec.rope_dimensions // 2), "one RoPE factor a frequency"


def check_metadata(architecture: Architecture, file: ModelFile, spec: ArchitectureSpec) -> None:
    """A missing key is optional or named in a `ModelError`; experts are refused, not ignored."""
    prefix = f"{file.architecture}."
    for key in [key for key in file.metadata if key.startswith(prefix)]:
        without = {name: value for name, value in file.metadata.items() if name != key}
        message = _refusal(architecture, _Edited(file, without))
        assert not message or key in message, f"without {key} the error does not name it: {message}"
    if not file.get("expert_count"):
        experts = {**file.metadata, f"{prefix}expert_count": 8}
        edited = _Edited(file, experts)
        assert _refusal(architecture, edited) or architecture.describe(edited) != spec, (
            "expert_count = 8 is ignored: the model would be computed without its experts"
        )


def _refusal(architecture: Architecture, file: ModelFile) -> str:
    """The message of the `ModelError` that describing the file raises, "" if it raises none."""
    try:
        architecture.describe(file)
    except ModelError as error:
        return str(error)
    return ""


def check_causality(model: CausalLM, tokens: Any) -> None:
    """Logits depend on earlier tokens alone, and do depend on them."""
    engine = _engine(model)
    logits = engine.logits(tokens)
    assert np.isfinite(logits).all(), "logits are finite"
    changed = tokens.copy()
    middle = len(tokens) // 2
    changed[middle] = (changed[middle] + 1) % model.spec.vocabulary_size
    other = engine.logits(changed)
    assert (other[:middle] == logits[:middle]).all(), "a later token changes earlier logits"
    assert not np.allclose(other[middle:], logits[middle:]), "a token does not change what follows"


def check_packing(model: CausalLM, tokens: Any) -> None:
    """A sequence has the same log-probabilities alone, beside others, and cut into passes."""
    sequences = [whole_sequence(tokens), whole_sequence(tokens[: TOKENS // 2]), whole_sequence(tokens[3:])]
    alone = [_engine(model).log_probabilities([sequence])[0] for sequence in sequences]
    packed = _engine(model).log_probabilities(sequences)
    for separate, together in zip(alone, packed, strict=True):
        assert (together == separate).all(), "a token's result depends on what shares its pass"
    cut = _engine(model, 7).log_probabilities(sequences)
    for separate, pieces in zip(alone, cut, strict=True):
        np.testing.assert_allclose(pieces, separate, rtol=1e-10, atol=1e-10, err_msg="cut into passes")


def check_gradients(
    model: CausalLM, tokens: Any, *, micro_batch: int = 4 * TOKENS, tolerance: float = 1e-6
) -> None:
    """Gradients of an adapter on every projection against central differences, kind by kind."""
    parameters = attach_factors(model, random_factors(model, rank=3), scale=0.7)
    engine = _engine(model, micro_batch)
    short = tokens[:9]
    sequences = [
        _with_weights(tokens, np.arange(len(tokens)) % 2 == 1),
        _with_weights(short, np.arange(len(short)) > 0),
    ]
    steps = plan_epoch(
        [sequence.predicts for sequence in sequences],
        range(len(sequences)),
        micro_batch=micro_batch,
        gradient_accumulation=-(-TOKENS // micro_batch) + 1,
    )
    for step in steps:
        engine.train_step(step, sequences, _weighted_nll, 2.0)
    rng = np.random.default_rng(5)
    for kind, members in _by_kind(parameters).items():
        directions = [rng.standard_normal(p.weight.shape) for p in members]
        expected = _central_difference(engine, sequences, members, directions)
        found = sum(float((p.grad * d).sum()) for p, d in zip(members, directions, strict=True))
        np.testing.assert_allclose(found, expected, rtol=tolerance, err_msg=f"gradient of {kind}")


def _central_difference(
    engine: TrainingEngine,
    sequences: Sequence[TrainingSequence],
    members: Sequence[Parameter],
    directions: Sequence[Any],
    step: float = 1e-5,
) -> float:
    def moved(distance: float) -> float:
        for parameter, direction in zip(members, directions, strict=True):
            parameter.weight[...] += distance * direction
        value = sum(float(np.dot(_weights(logp.size), logp)) for logp in engine.log_probabilities(sequences))
        return -value / 2.0

    ahead = moved(step)
    behind = moved(-2.0 * step)
    moved(step)
    return (ahead - behind) / (2.0 * step)


def _weighted_nll(batch: LossBatch) -> LossResult:
    value = -float(np.dot(batch.weight, batch.logp)) / batch.normalizer
    return LossResult(value=value, dlogp=-batch.weight / batch.normalizer)


def _weights(count: int) -> Any:
    return 1.0 + np.arange(count) % 3


def _with_weights(tokens: Any, trained: Any) -> TrainingSequence:
    """A sequence whose trained tokens have different weights."""
    weight = np.zeros(len(tokens))
    weight[trained] = _weights(int(trained.sum()))
    return TrainingSequence(tokens=tokens, trained=trained, weight=weight)


def _by_kind(parameters: Sequence[Parameter]) -> Mapping[str, list[Parameter]]:
    """Parameters of all blocks by what they are: "attn_q.weight.a"."""
    kinds: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.name.split(".", 2)[2], []).append(parameter)
    return kinds


def _engine(model: CausalLM, micro_batch: int = 4 * TOKENS) -> TrainingEngine:
    settings = EngineSettings(micro_batch=micro_batch, kv_dtype="compute", chunked_ce_tiles=3)
    return TrainingEngine(model, None, settings)


def _tokens(spec: ArchitectureSpec, count: int) -> Any:
    return np.random.default_rng(7).integers(0, spec.vocabulary_size, count).astype(np.int32)


class _Edited:
    """A model file with other metadata."""

    def __init__(self, file: ModelFile, metadata: Mapping[str, Any]) -> None:
        self.file = file
        self.metadata = metadata
        self.path = file.path
        self.architecture = file.architecture

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.file.tensors

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def matrix(self, name: str) -> QuantMatrix:
        return self.file.matrix(name)

    def vector(self, name: str) -> Any:
        return self.file.vector(name)

    def fingerprint(self) -> str:
        return self.file.fingerprint()
