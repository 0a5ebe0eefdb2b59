"""Merged models: complete, in the format asked for, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from retrograd.gguf import GGUFFile, merge, open_model
from retrograd.gguf.adapter import read_adapter, write_adapter
from retrograd.gguf.formats import dequantise
from retrograd.gguf.merge import MERGE_FORMATS, MergeFormat, merge_adapter
from retrograd.gguf.writer import TensorPlan, write_gguf
from retrograd_hookspecs import ModelError
from tests.gguf.test_adapter import TOKENS, TinyModels, random_factors, write
from tests.llamacpp.llamacpp import LlamaCpp


@pytest.mark.parametrize("dtype", MERGE_FORMATS)
def test_contents(dtype: MergeFormat, tiny_model: TinyModels, tmp_path: Path, llamacpp: LlamaCpp) -> None:
    base = open_model(tiny_model(architecture="gemma3", format="Q4_0", formats={"token_embd.weight": "Q8_0"}))
    adapter = read_adapter(write(tmp_path / "a.gguf", base, random_factors(base)))
    steps: list[tuple[int, int]] = []
    report = merge_adapter(
        base,
        adapter,
        tmp_path / "m.gguf",
        dtype=dtype,
        progress=lambda done, total: steps.append((done, total)),
    )
    merged = open_model(report.path)
    assert report.bytes == report.path.stat().st_size
    assert report.merged == 7 * 7
    assert report.notes == ()
    assert steps == sorted(steps)
    assert steps[-1] == (sum(info.bytes for info in merged.tensors.values()),) * 2
    assert list(merged.tensors) == list(base.tensors)  # the tied head stays one tensor
    for info in merged.tensors.values():
        assert info.format == ("F32" if len(info.shape) == 1 else dtype.upper())
    changed = {"general.file_type"}
    assert {key: value for key, value in merged.metadata.items() if key not in changed} == {
        key: value for key, value in base.metadata.items() if key not in changed
    }
    assert merged.metadata["general.file_type"] == {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[dtype]
    name = "blk.3.ffn_down.weight"
    expected = dequantise(base.matrix(name).data, "Q4_0") + adapter.delta(name, 0, 64)
    actual = dequantise(merged.matrix(name).data, dtype.upper())
    tolerance = {"f32": 0.0, "f16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2}[dtype]
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())
    np.testing.assert_array_equal(merged.vector("output_norm.weight"), base.vector("output_norm.weight"))
    p = llamacpp.next_token_logprobs(base.path, TOKENS, adapter=adapter.path)
    q = llamacpp.next_token_logprobs(report.path, TOKENS)
    assert (np.exp(p) * (p - q)).sum(axis=1).mean() < 0.02


@pytest.mark.parametrize(
    "options", [{"rope_factors": True}, {"architecture": "qwen2"}, {"architecture": "qwen3"}]
)
def test_vectors_of_every_kind_stay(
    options: dict[str, object], tiny_model: TinyModels, tmp_path: Path, llamacpp: LlamaCpp
) -> None:
    base = open_model(tiny_model(format="F16", **options))
    path = write(tmp_path / "a.gguf", base, random_factors(base))
    report = merge_adapter(base, path, tmp_path / "m.gguf", dtype="f32")
    merged = open_model(report.path)
    for name, info in base.tensors.items():
        if len(info.shape) == 1:
            np.testing.assert_array_equal(merged.vector(name), base.vector(name))
    adapted = llamacpp.logits(base.path, TOKENS, adapter=path)
    # F16 weights are multiplied by activations rounded to F16, F32 weights are not.
    np.testing.assert_allclose(llamacpp.logits(merged.path, TOKENS), adapted, atol=0.05)


def test_widths_that_do_not_fit_q8_0_become_f16(
    tiny_model: TinyModels, tmp_path: Path, llamacpp: LlamaCpp
) -> None:
    base = open_model(tiny_model(embedding_length=48, head_length=12))
    path = write(tmp_path / "a.gguf", base, random_factors(base))
    report = merge_adapter(base, path, tmp_path / "m.gguf", dtype="q8_0")
    merged = open_model(report.path)
    assert merged.matrix("blk.0.attn_q.weight").format == "F16"
    assert merged.matrix("blk.0.ffn_down.weight").format == "Q8_0"
    assert "blk.0.attn_q.weight: its width 48 does not fit Q8_0 blocks; written as F16" in report.notes
    adapted = llamacpp.logits(base.path, TOKENS, adapter=path)
    np.testing.assert_allclose(llamacpp.logits(merged.path, TOKENS), adapted, atol=0.5)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = 40000, 128
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    plan = TensorPlan(name="blk.0.ffn_up.weight", shape=(rows, columns), format="F32")
    write_gguf(tmp_path / "base.gguf", {"general.architecture": "llama"}, [(plan, values)])
    factors = {plan.name: (np.ones((2, columns), np.float32), np.ones((rows, 2), np.float32))}
    write_adapter(tmp_path / "a.gguf", architecture="llama", alpha=1.0, factors=factors)
    base, adapter = open_model(tmp_path / "base.gguf"), read_adapter(tmp_path / "a.gguf")
    monkeypatch.setattr(merge, "_VALUES_PER_BLOCK", 1 << 15)
    tracemalloc.start()
    merge_adapter(base, adapter, tmp_path / "m.gguf", dtype="q8_0")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes / 8
    merged = GGUFFile(tmp_path / "m.gguf").packed(plan.name)
    np.testing.assert_allclose(dequantise(merged, "Q8_0"), values + 1.0, atol=0.03)


def test_split_bases_become_one_file(tiny_model: TinyModels, tmp_path: Path) -> None:
    from tests.gguf.test_reader import split_model

    base = open_model(split_model(tiny_model(), tmp_path, 3)[0])
    path = write(tmp_path / "a.gguf", base, random_factors(base))
    merged = open_model(merge_adapter(base, path, tmp_path / "m.gguf", dtype="f16").path)
    assert set(merged.tensors) == set(base.tensors)
    assert not [key for key in merged.metadata if key.startswith("split.")]


def test_refusals(tiny_model: TinyModels, tmp_path: Path) -> None:
    base = open_model(tiny_model())
    factors = random_factors(base)
    path = write(tmp_path / "a.gguf", base, factors)
    with pytest.raises(ModelError, match=r"would replace .*give another output path"):
        merge_adapter(base, path, path, dtype="f16")
    with pytest.raises(ModelError, match="'q4_0' is not one of f16, bf16, f32, q8_0"):
        merge_adapter(base, path, tmp_path / "m.gguf", dtype="q4_0")  # type: ignore[arg-type]
    huge = {name: (1e4 * a, 1e4 * b) for name, (a, b) in factors.items()}
    path = write(tmp_path / "huge.gguf", base, huge)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight: value .* is outside the range of F16"):
        merge_adapter(base, path, tmp_path / "m.gguf", dtype="f16")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.gguf", "huge.gguf"]
