"""LoRA: targets, initial values, rounding, files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from retrograd.gguf.adapter import read_adapter, write_adapter
from retrograd.nn import CausalLM
from retrograd.nn.targets import resolve_targets
from retrograd_hookspecs import BuildContext, ConfigError, ModelError
from retrograd_plugins.trainables._lora_adapter import LoraAdapter, initial_factors
from retrograd_plugins.trainables.lora import LoraConfig, check, retrograd_trainables
from tests.model_support import build_backend, build_kernels, engine_for, load_model


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> CausalLM:
    return load(tiny_model(architecture="llama"))


def load(path: Path) -> CausalLM:
    backend = build_backend("reference")
    return load_model(path, backend, build_kernels(backend))


def build(model: CausalLM, **keys: Any) -> LoraAdapter:
    component = retrograd_trainables()[0]
    context = BuildContext(config=None, base_dir=Path.cwd(), services={"model": model})
    adapter: LoraAdapter = component.build(LoraConfig(**keys), context)
    return adapter


def names(adapter: LoraAdapter) -> list[str]:
    return [p.name.removesuffix(".lora_a") for p in adapter.parameters if p.name.endswith(".lora_a")]


def trained(adapter: LoraAdapter, seed: int = 0) -> LoraAdapter:
    """Values as after some training."""
    rng = np.random.default_rng(seed)
    for parameter in adapter.parameters:
        parameter.value[...] += rng.standard_normal(parameter.value.shape) * 0.02
    adapter.refresh()
    return adapter


TOKENS = np.arange(12, dtype=np.int32)


def test_defaults_are_those_of_the_reference(model: CausalLM) -> None:
    adapter = build(model)
    assert names(adapter) == list(model.projections)
    assert {f.rank for f in (p.lora for p in model.projections.values()) if f} == {8}
    assert {p.lora.scale for p in model.projections.values() if p.lora} == {2.0}
    assert {p.dtype for p in adapter.parameters} == {"f16"}
    assert "14 matrices of 2 blocks" in adapter.summary()
    assert "rank 8, alpha 16, stored as f16" in adapter.summary()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q",), ["blk.0.attn_q", "blk.1.attn_q"]),
        (("v", "q", "q"), ["blk.0.attn_q", "blk.0.attn_v", "blk.1.attn_q", "blk.1.attn_v"]),
        (("blk.1.ffn_*.weight",), ["blk.1.ffn_gate", "blk.1.ffn_up", "blk.1.ffn_down"]),
        (
            ("blk.*.attn_output.weight", "ffn_up"),
            ["blk.0.attn_output", "blk.0.ffn_up", "blk.1.attn_output", "blk.1.ffn_up"],
        ),
        (("blk.0.attn_k.weight",), ["blk.0.attn_k"]),
    ],
)
def test_targets(model: CausalLM, targets: tuple[str, ...], expected: list[str]) -> None:
    assert resolve_targets(targets, model) == [f"{name}.weight" for name in expected]


def test_auto_takes_every_projection(model: CausalLM) -> None:
    assert resolve_targets(("auto",), model) == list(model.projections)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("kk", r"target 'kk' selects no tensor of .*did you mean 'k'.*candidates: q, k, v, o, ffn_up"),
        ("blk.7.attn_q.weight", r"selects no tensor .*\(did you mean 'blk\.\d\.attn_q\.weight'\?\)"),
        ("blk.*.attn_norm.weight", r"selects blk\.0\.attn_norm\.weight, .* projections only"),
        ("token_embd", r"token_embd\.weight, which holds the token embeddings and is also the output head"),
        ("output", r"selects token_embd\.weight.*also the output head"),
        ("*.weight", r"selects token_embd\.weight"),
    ],
)
def test_targets_that_cannot_be_adapted(model: CausalLM, target: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_targets(("q", target), model)
    with pytest.raises(ConfigError, match=rf"lora\.targets: .*{message}"):
        build(model, targets=("q", target))


def test_an_output_head_of_its_own_is_refused(tiny_model: Callable[..., Path]) -> None:
    untied = load(tiny_model(architecture="qwen2"))
    for target in ("output.weight", "lm_head"):
        with pytest.raises(ModelError, match=r"selects output\.weight, the output head"):
            resolve_targets((target,), untied)
    with pytest.raises(ModelError, match="no target is given"):
        resolve_targets((), untied)


def test_training_starts_at_the_base_model(model: CausalLM) -> None:
    base = engine_for(model).logits(TOKENS)
    adapter = build(model, seed=3)
    assert (engine_for(model).logits(TOKENS) == base).all()
    for a, b in zip(adapter.parameters[::2], adapter.parameters[1::2], strict=True):
        bound = a.value.shape[1] ** -0.5
        assert 0.9 * bound < np.abs(a.value).max() <= bound
        assert a.value.std() == pytest.approx(bound / 3**0.5, rel=0.15)
        assert not b.value.any()


def test_initial_values_depend_on_seed_and_name_alone(model: CausalLM) -> None:
    few = initial_factors(model, ["blk.1.attn_q.weight"], rank=4, seed=1)
    many = initial_factors(model, list(model.projections), rank=4, seed=1)
    other = initial_factors(model, list(model.projections), rank=4, seed=2)
    name = "blk.1.attn_q.weight"
    assert (few[name][0] == many[name][0]).all()
    assert (few[name][0] != other[name][0]).any()
    assert (many["blk.0.attn_q.weight"][0] != many[name][0]).any()


def test_the_forward_reads_rounded_masters(model: CausalLM) -> None:
    adapter = trained(build(model))
    for parameter in adapter.parameters:
        expected = parameter.value.astype(np.float16).astype(model.backend.compute_dtype)
        np.testing.assert_array_equal(model.backend.to_host(parameter.weight), expected)
        assert (parameter.weight != parameter.value).any()
    small = adapter.parameters[0]
    before = np.array(small.weight)
    for _ in range(40):
        small.value[...] *= np.float32(1 + 2e-5)
        adapter.refresh()
    assert (small.weight != before).any(), "updates below half a unit of f16 must add up"


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_what_is_saved_is_what_was_trained(model: CausalLM, tmp_path: Path, dtype: str) -> None:
    adapter = trained(build(model, rank=4, alpha=6.0, targets=("q", "ffn_down"), dtype=dtype))
    logits = engine_for(model).logits(TOKENS)
    adapter.save(tmp_path / "a.gguf")
    stored = read_adapter(tmp_path / "a.gguf")
    assert (stored.architecture, stored.alpha, stored.rank, stored.dtype) == ("llama", 6.0, 4, dtype)
    assert stored.base_fingerprint == model.file.fingerprint()

    again = load(model.file.path)
    fresh = build(again, rank=4, alpha=6.0, targets=("q", "ffn_down"), dtype=dtype)
    fresh.load(tmp_path / "a.gguf")
    assert (engine_for(again).logits(TOKENS) == logits).all()
    started = build(load(model.file.path), init_adapter=tmp_path / "a.gguf")
    assert (engine_for(started._model).logits(TOKENS) == logits).all()
    assert "rank 4, alpha 6" in started.summary()
    assert "started from a.gguf" in started.summary()
    assert {p.dtype for p in started.parameters} == {dtype}


def test_adapters_of_other_runs_are_refused(
    model: CausalLM, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    path = tmp_path / "a.gguf"
    build(model, rank=4).save(path)
    with pytest.raises(ModelError, match=r"its targets or ranks differ from this run's, first at blk\.0"):
        build(load(model.file.path), rank=8).load(path)
    with pytest.raises(ModelError, match=r"its alpha is 16, this run's 4; set lora\.alpha"):
        build(load(model.file.path), rank=4, alpha=4.0).load(path)
    other = load(tiny_model(architecture="llama", seed=5))
    with pytest.raises(ModelError, match="was trained on another file"):
        build(other, rank=4).load(path)
    assert "was trained on another file" in build(other, init_adapter=path).summary()


def test_adapters_on_what_cannot_be_trained_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = load(tiny_model(architecture="qwen2"))
    rows, columns = model.head.weight.shape
    write_adapter(
        tmp_path / "head.gguf",
        architecture="qwen2",
        alpha=1.0,
        factors={"output.weight": (np.ones((2, columns), np.float32), np.ones((rows, 2), np.float32))},
    )
    with pytest.raises(ModelError, match=r"changes output\.weight, which cannot be trained here"):
        build(model, init_adapter=tmp_path / "head.gguf")


def test_values_that_f16_cannot_hold_are_not_written(model: CausalLM, tmp_path: Path) -> None:
    adapter = build(model, targets=("q",))
    adapter.parameters[1].value[0, 0] = 1e6
    with pytest.raises(ModelError, match="not finite"):
        adapter.save(tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_parameters_are_views_of_common_buffers(model: CausalLM) -> None:
    adapter = build(model)
    for kind in ("value", "grad", "weight"):
        arrays = [getattr(parameter, kind) for parameter in adapter.parameters]
        assert all(array.flags.c_contiguous for array in arrays)
        bases = {id(array.base if array.base is not None else array) for array in arrays}
        assert len(bases) == 1
        for array in arrays:
            assert array.ctypes.data % array.itemsize == 0
    flat = [p.value.ctypes.data for p in adapter.parameters]
    assert all((address - flat[0]) % 64 == 0 for address in flat)


def test_the_base_model_is_there_without_the_adapter(model: CausalLM) -> None:
    base = engine_for(model).logits(TOKENS)
    trained(build(model))
    changed = engine_for(model).logits(TOKENS)
    with model.without_adapter():
        assert (engine_for(model).logits(TOKENS) == base).all()
    assert (engine_for(model).logits(TOKENS) == changed).all()
    assert (changed != base).any()


def test_a_missing_initial_adapter_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    @attrs.frozen
    class Table:
        name: str = "lora"

        def where(self, key: str = "") -> str:
            return "run.toml:7"

        def __contains__(self, key: object) -> bool:
            return key == "init_adapter"

    @attrs.frozen
    class Run:
        checkpoint: None = None

    [problem] = check(LoraConfig(init_adapter=tmp_path / "no.gguf"), Table(), Run())
    assert str(problem).startswith("run.toml:7: lora.init_adapter: there is no file")
    present = tmp_path / "yes.gguf"
    present.touch()
    assert list(check(LoraConfig(init_adapter=present), Table(), Run())) == []
