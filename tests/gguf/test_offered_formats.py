"""A tensor format that a plugin offers: a model is read, scored, adapted and merged as with ggml's own."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.assembly import Assembly, assemble
from retrograd.config import Document
from retrograd.engine import TrainingSequence
from retrograd.errors import ModelError, PluginError
from retrograd.gguf import open_model
from retrograd.gguf.formats import format_table
from retrograd.gguf.merge import merge_adapter
from retrograd.testing.quants import check_quant
from retrograd_hookspecs import BlockLayout

TYPE_ID = 1000
PLUGIN = f"""\
import numpy as np

from retrograd_hookspecs import BlockLayout, Component, ModelError, NoConfig, hookimpl

BLOCK, BYTES = 32, 34  # a half-precision scale, then 32 whole numbers: what Q8_0 is


class Mine:
    formats = {{"MINE8": BlockLayout(type_id={TYPE_ID}, values=BLOCK, bytes=BYTES)}}
    readable = writable = frozenset(formats)

    def dequantise(self, data, format):
        blocks = self._blocks(data, format, BYTES)
        scales = blocks[..., :2].copy().view("<f2").astype(np.float32)
        values = blocks[..., 2:].view(np.int8) * scales
        return values.reshape(*data.shape[:-1], -1)

    def quantise(self, values, format):
        blocks = self._blocks(values.astype(np.float32), format, BLOCK)
        scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype("<f2")
        steps = np.maximum(scales.astype(np.float32), 1e-8)
        whole = np.clip(np.rint(blocks / steps), -127, 127).astype(np.int8)
        packed = np.concatenate([scales.view(np.uint8), whole.view(np.uint8)], -1)
        return packed.reshape(*values.shape[:-1], -1)

    def _blocks(self, array, format, size):
        if format != "MINE8" or array.shape[-1] % size:
            raise ModelError(f"{{format}} of {{array.shape[-1]}}")
        return np.ascontiguousarray(array).reshape(*array.shape[:-1], -1, size)


@hookimpl
def retrograd_quants():
    return [Component(name="mine", config=NoConfig, build=lambda c, x: Mine(), summary="My blocks.")]
"""


def renumbered(model: Path, out: Path) -> Path:
    """The model with the type of its Q8_0 matrices called by the plugin's number."""
    data = bytearray(model.read_bytes())
    for name, info in open_model(model).tensors.items():
        if info.format == "Q8_0":
            encoded = struct.pack("<Q", len(name)) + name.encode()
            at = data.index(encoded) + len(encoded) + 4 + 8 * len(info.shape)
            assert struct.unpack_from("<I", data, at) == (8,)
            struct.pack_into("<I", data, at, TYPE_ID)
    out.write_bytes(data)
    return out


@pytest.fixture
def assembled(tmp_path: Path) -> Callable[[Path], Assembly]:
    (tmp_path / "mine.py").write_text(PLUGIN)

    def make(model: Path) -> Assembly:
        tables = {"model": {"path": str(model), "device": "reference"}, "plugins": {"load": ["mine.py"]}}
        return assemble(Document.from_values(tables, base_dir=tmp_path), algorithm=False)

    return make


def test_a_model_in_a_plugins_format(
    assembled: Callable[[Path], Assembly], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    known = tiny_model(format="Q8_0")
    unknown = renumbered(known, tmp_path / "mine.gguf")
    with pytest.raises(ModelError, match=r"type 1000 is unknown .* no plugin of the kind quants offers it"):
        open_model(unknown)

    tokens = np.arange(1, 13, dtype=np.int32)
    sequence = TrainingSequence(tokens=tokens, trained=tokens > 4)
    scores, merged = [], []
    for number, model in enumerate((known, unknown)):
        services = assembled(model).services
        file, engine = services.get("model_file"), services.get("engine")
        scores.append(engine.log_probabilities([sequence])[0])
        adapter, out = tmp_path / f"adapter{number}.gguf", tmp_path / f"merged{number}.gguf"
        for parameter in services.get("trainable").parameters:
            parameter.value += 0.25
        services.get("trainable").refresh()
        services.get("trainable").save(adapter)
        report = merge_adapter(file, adapter, out, dtype="f16")
        assert report.merged > 0
        merged.append({name: open_model(out).packed(name) for name in open_model(out).tensors})
    assert "MINE8" in {info.format for info in file.tensors.values()}
    np.testing.assert_array_equal(*scores)
    assert merged[0].keys() == merged[1].keys()
    for name, packed in merged[0].items():
        np.testing.assert_array_equal(packed, merged[1][name], name)


def test_the_cpu_expands_it(
    assembled: Callable[[Path], Assembly], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    from retrograd_plugins.kernels.cpu._gemm_expanded import expand

    known = tiny_model(format="Q8_0")
    file = assembled(renumbered(known, tmp_path / "mine.gguf")).services.get("model_file")
    name = "blk.0.attn_q.weight"
    assert file.matrix(name).format == "MINE8"
    expected = expand(open_model(known).matrix(name))
    np.testing.assert_array_equal(expand(file.matrix(name)).data, expected.data)


def offered() -> Any:
    module: dict[str, Any] = {}
    exec(PLUGIN, module)
    return module["Mine"]()


def test_the_contract() -> None:
    check_quant(offered())


def test_a_format_is_offered_once() -> None:
    mine, theirs = offered(), offered()
    theirs.formats = {"THEIRS": mine.formats["MINE8"]}
    said = r"THEIRS \(type 1000\) of the quants 'b' has the number of one of 'a'"
    with pytest.raises(PluginError, match=said):
        format_table({"a": mine, "b": theirs})
    theirs.formats = {"MINE8": BlockLayout(type_id=7, values=1, bytes=1)}
    with pytest.raises(PluginError, match="has the name of one of 'a'"):
        format_table({"a": mine, "b": theirs})


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"dequantise": lambda data, format: np.zeros(1, np.float32)}, "bytes"),
        ({"quantise": lambda values, format: np.zeros((2, 3, 4 * 34), np.uint8)}, "nothing to do with"),
        ({"readable": frozenset({"MINE8", "OTHER"})}, "has no layout"),
        ({"formats": {"mine8": BlockLayout(type_id=1, values=1, bytes=1)}}, "upper case"),
    ],
)
def test_the_suite_finds_what_is_broken(broken: dict[str, Any], said: str) -> None:
    quant = offered()
    for name, value in broken.items():
        setattr(quant, name, value)
    with pytest.raises(AssertionError, match=said):
        check_quant(quant)
