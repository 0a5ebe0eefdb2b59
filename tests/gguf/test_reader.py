"""Opening models: what is read, how fast and lazily, split files, and damage of every kind."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf import GGUFReader
from retrograd.gguf import GGUFFile, open_model
from retrograd.gguf.formats import dequantisable_formats
from retrograd.gguf.writer import TensorPlan, write_gguf
from retrograd_hookspecs import ModelError
from tests.llamacpp.llamacpp import LlamaCpp

TinyModels = Callable[..., Path]


def test_everything_agrees_with_the_gguf_package(tiny_model: TinyModels) -> None:
    path = tiny_model(architecture="qwen2", format="Q5_0")
    ours, theirs = open_model(path), GGUFReader(path)
    known = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert dict(ours.metadata) == known
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(extent) for extent in reversed(tensor.shape))
        assert (info.format, info.bytes) == (tensor.tensor_type.name, tensor.n_bytes)
        expected = dequantize(tensor.data, tensor.tensor_type)
        if len(info.shape) == 1:
            np.testing.assert_array_equal(ours.vector(tensor.name), expected)
        else:
            matrix = ours.matrix(tensor.name)
            np.testing.assert_array_equal(matrix.data, tensor.data.view(np.uint8).reshape(matrix.rows, -1))


def test_arrays_are_read_only_views(tiny_model: TinyModels) -> None:
    matrix = open_model(tiny_model(format="Q4_0")).matrix("blk.0.attn_q.weight")
    assert matrix.data.dtype == np.uint8
    assert matrix.shape == (64, 64)
    assert matrix.data.shape == (64, 36)
    with pytest.raises(ValueError, match="read-only"):
        matrix.data[0, 0] = 1
    copy = open_model(tiny_model(format="Q4_0")).vector("output_norm.weight")
    copy[0] = 1.0


@pytest.mark.parametrize(("fixture", "seconds"), [("smollm2_path", 0.3), ("gemma3_path", 1.5)])
def test_real_models_open_fast(fixture: str, seconds: float, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(fixture)
    start = time.process_time()
    model = open_model(path)
    assert time.process_time() - start < seconds
    assert len(model.metadata["tokenizer.ggml.tokens"]) in (49152, 262144)


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    rows, columns = 1 << 20, 4096
    write_gguf(path, {"general.architecture": "llama"}, [_zeros("x.weight", (1, columns))])
    data = bytearray(path.read_bytes())
    # The same file with 16 GiB of data, as a hole in the disk: only the row count in the table changes.
    at = data.index(b"x.weight") + len(b"x.weight") + 4 + 8
    data[at : at + 8] = struct.pack("<Q", rows)
    path.write_bytes(data[: -columns * 4])
    with path.open("r+b") as file:
        file.truncate(len(data) + (rows - 1) * columns * 4)
    before = psutil.Process().memory_info().rss
    model = open_model(path)
    assert model.matrix("x.weight").shape == (rows, columns)
    assert not model.matrix("x.weight").data[-1].any()
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_missing_and_misshapen_tensors_are_named(tiny_model: TinyModels) -> None:
    model = open_model(tiny_model())
    with pytest.raises(ModelError, match=r"no tensor blk\.0\.attn_p\.weight \(similar: .*attn_q\.weight"):
        model.matrix("blk.0.attn_p.weight")
    with pytest.raises(ModelError, match=r"output_norm\.weight has shape \(64,\); a matrix"):
        model.matrix("output_norm.weight")
    with pytest.raises(ModelError, match="a vector was expected"):
        model.vector("token_embd.weight")


def test_files_that_are_not_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        open_model(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match=r"'s3:' is meant as a locator, no installed plugin knows it"):
        open_model("s3:bucket/m.gguf")
    with pytest.raises(ModelError, match="a directory"):
        open_model(tmp_path)
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(ModelError, match="empty"):
        open_model(empty)
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelError, match=r"begins with .* instead of b'GGUF'.*convert_hf_to_gguf"):
        open_model(other)
    adapter = tmp_path / "adapter.gguf"
    write_gguf(adapter, {"general.architecture": "llama", "general.type": "adapter"}, [])
    with pytest.raises(ModelError, match="this is an adapter; give its base model"):
        open_model(adapter)
    nameless = tmp_path / "nameless.gguf"
    write_gguf(nameless, {"general.type": "model"}, [])
    with pytest.raises(ModelError, match=r"general\.architecture is missing"):
        open_model(nameless)


def _zeros(name: str, shape: tuple[int, ...]) -> tuple[TensorPlan, np.ndarray[Any, Any]]:
    return TensorPlan(name=name, shape=shape, format="F32"), np.zeros(shape, np.float32)


def _small(path: Path, **metadata: Any) -> bytes:
    pairs = {
        "general.architecture": "llama",
        "list": ["a", "bc"],
        "numbers": [1, 2, 3],
        "flag": True,
        **metadata,
    }
    write_gguf(path, pairs, [_zeros("a.weight", (2, 32)), _zeros("b.weight", (4,))])
    return path.read_bytes()


def _replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


def _entry(dimensions: int = 1, type_id: int = 0, offset: int = 256) -> bytes:
    """The table's entry of the second tensor of `_small`, after its name."""
    return b"b.weight" + struct.pack("<IQIQ", dimensions, 4, type_id, offset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], r"big-endian.*gguf-convert-endian"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], r"version 1 is not supported"),
        (lambda d: d[:8] + struct.pack("<Q", 1 << 60) + d[16:], r"announces 1152921504606846976 tensors"),
        (lambda d: _replaced(d, b"b.weight", b"a.weight"), r"tensor a.weight: the tensor occurs twice"),
        (lambda d: _replaced(d, b"flag", b"list"), r"metadata list: the key occurs twice"),
        (lambda d: d[:-20], r"tensor b\.weight: its data ends at byte \d+, but .* truncated"),
        (lambda d: _replaced(d, _entry(), _entry(type_id=99)), r"type 99 is unknown.*pip install -U gguf"),
        (lambda d: _replaced(d, _entry(), _entry(type_id=2)), r"rows of 4 values are not whole Q4_0 blocks"),
        (lambda d: _replaced(d, _entry(), _entry(dimensions=9)), r"tensor b\.weight: it has 9 dimensions"),
        (lambda d: _replaced(d, _entry(), _entry(offset=257)), r"257 is not a multiple of the alignment 32"),
        (lambda d: _replaced(d, _entry(), _entry(offset=1 << 40)), r"its data ends at byte"),
        (
            lambda d: _replaced(d, b"flag" + struct.pack("<I", 7), b"flag" + struct.pack("<I", 77)),
            r"metadata flag: value type 77 is unknown",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_damage_is_named_with_a_mend(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(_small(path)))
    with pytest.raises(ModelError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    data = _small(path)
    for length in range(len(data) - 16):  # the last 16 bytes are padding after the data
        path.write_bytes(data[:length])
        with pytest.raises(ModelError):
            GGUFFile(path)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 330), value=st.integers(0, 255), more=st.integers(0, 330))
def test_random_damage_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, more: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    data = bytearray(_small(path))
    data[at % len(data)] = value
    data[more % len(data)] ^= 0x80
    path.write_bytes(data)
    try:
        model = GGUFFile(path)
    except ModelError:
        return
    for name in model.tensors:
        model.packed(name)


def test_deeply_nested_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    data = _small(path)
    nested = struct.pack("<IQ", 9, 1) * 20000
    start = data.index(b"numbers") + len(b"numbers")
    path.write_bytes(data[:start] + struct.pack("<I", 9) + nested + data[start:])
    with pytest.raises(ModelError, match="nested more than 4 deep"):
        GGUFFile(path)


def test_bytes_that_are_not_utf8_survive(tmp_path: Path) -> None:
    path = tmp_path / "bytes.gguf"
    _small(path, odd=[b"\xff\xfe", b"ok"])
    model = GGUFFile(path)
    assert model.metadata["odd"] == ["\udcff\udcfe", "ok"]
    copy = tmp_path / "copy.gguf"
    write_gguf(copy, {key: model.raw_metadata(key) for key in model.metadata}, [])
    assert dict(GGUFFile(copy).metadata) == dict(model.metadata)


def split_model(source: Path, directory: Path, count: int) -> list[Path]:
    """The model cut into `count` files as llama-gguf-split does: metadata in the first."""
    model = open_model(source)
    names = list(model.tensors)
    paths = []
    for number in range(count):
        metadata: dict[str, Any] = {
            "split.no": np.uint16(number),
            "split.count": np.uint16(count),
            "split.tensors.count": np.int32(len(names)),
        }
        if number == 0:
            metadata = {key: model.raw_metadata(key) for key in model.metadata} | metadata
        share = names[number::count]
        infos = [model.tensors[name] for name in share]
        path = directory / f"tiny-{number + 1:05d}-of-{count:05d}.gguf"
        plans = [TensorPlan(name=info.name, shape=info.shape, format=info.format) for info in infos]
        write_gguf(path, metadata, [(plan, model.packed(plan.name)) for plan in plans])
        paths.append(path)
    return paths


def test_split_models_open_as_one(tiny_model: TinyModels, tmp_path: Path, llamacpp: LlamaCpp) -> None:
    source = tiny_model(format="Q8_0")
    parts = split_model(source, tmp_path, 3)
    whole = open_model(source)
    for part in parts:
        model = open_model(part)
        assert set(model.tensors) == set(whole.tensors)
        assert model.architecture == "llama"
        for name in whole.tensors:
            np.testing.assert_array_equal(model.packed(name), whole.packed(name))
    assert open_model(parts[0]).fingerprint() == open_model(parts[2]).fingerprint()
    # The parts are what stock llama.cpp takes for a split model, too.
    tokens = [1, 2, 3]
    np.testing.assert_array_equal(llamacpp.logits(parts[0], tokens), llamacpp.logits(source, tokens))


def test_split_models_that_are_not_complete(tiny_model: TinyModels, tmp_path: Path) -> None:
    parts = split_model(tiny_model(), tmp_path, 3)
    renamed = tmp_path / "model.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelError, match=r"one part of a model split into 3.*original names"):
        open_model(renamed)
    third = parts[2].read_bytes()
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"missing beside it: tiny-00003-of-00003\.gguf"):
        open_model(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelError, match="by its metadata it is part 1 of 3, by its name 2 of 3"):
        open_model(parts[0])
    parts[2].write_bytes(third)
    assert len(open_model(parts[0]).tensors) == 20


@pytest.mark.parametrize("name", dequantisable_formats())
def test_every_format_is_read(name: str, tmp_path: Path) -> None:
    from retrograd.testing.quants import random_weights

    rng = np.random.default_rng(0)
    packed = random_weights(rng, 4, 512, name, 0.5)
    path = tmp_path / "format.gguf"
    plan = TensorPlan(name="w.weight", shape=(4, 512), format=name)
    write_gguf(path, {"general.architecture": "llama"}, [(plan, packed)])
    matrix = open_model(path).matrix("w.weight")
    theirs = GGUFReader(path).tensors[0]
    assert (matrix.format, matrix.shape) == (theirs.tensor_type.name, (4, 512))
    np.testing.assert_array_equal(matrix.data.reshape(-1), theirs.data.reshape(-1).view(np.uint8))
