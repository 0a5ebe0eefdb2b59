"""Writing GGUFs: types survive, files are complete or absent, a full disk loses nothing."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGUFValueType

from gguf import GGUFReader
from retrograd.gguf import GGUFFile
from retrograd.gguf.writer import GGUFOutput, TensorPlan, atomic_file, write_gguf
from retrograd_hookspecs import ModelError

PLAN = TensorPlan(name="w.weight", shape=(2, 32), format="F32")


def test_value_types(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "bool": True,
        "int": 7,
        "negative": -7,
        "wide": np.uint64(1 << 40),
        "short": np.uint16(3),
        "float": 0.5,
        "double": np.float64(0.1),
        "texts": ["a", "ü"],
        "mixed signs": [1, -1],
        "floats": [0.5, 1.5],
        "array": np.arange(3, dtype=np.int16),
        "empty": [],
        "text": "",
    }
    write_gguf(path, values, [])
    fields = GGUFReader(path).fields
    assert fields["bool"].types == [GGUFValueType.BOOL]
    assert fields["int"].types == [GGUFValueType.UINT32]
    assert fields["negative"].types == [GGUFValueType.INT32]
    assert fields["wide"].types == [GGUFValueType.UINT64]
    assert fields["short"].types == [GGUFValueType.UINT16]
    assert fields["float"].types == [GGUFValueType.FLOAT32]
    assert fields["double"].types == [GGUFValueType.FLOAT64]
    assert fields["array"].types == [GGUFValueType.ARRAY, GGUFValueType.INT16]
    assert fields["mixed signs"].types == [GGUFValueType.ARRAY, GGUFValueType.INT32]
    read = GGUFFile(path).metadata
    assert {key: read[key] for key in values} == values | {"array": [0, 1, 2]}


def test_a_copied_value_keeps_its_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(first, {"general.architecture": "x", "k": np.int8(-3), "l": [[1, 2][0], 2]}, [])
    source = GGUFFile(first)
    write_gguf(second, {key: source.raw_metadata(key) for key in source.metadata}, [])
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("value", [1 << 33, [1, "a"], {"a": 1}, None, np.zeros((2, 2), np.float32)])
def test_values_without_a_type_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelError, match=r"metadata some\.key"):
        write_gguf(tmp_path / "x.gguf", {"some.key": value}, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "aligned.gguf"
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    norm = TensorPlan(name="n.weight", shape=(3,), format="F32")
    vector = np.array([1, 2, 3], np.float32)
    write_gguf(path, {"general.architecture": "x"}, [(norm, vector), (PLAN, rows)], alignment=alignment)
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert all(tensor.data_offset % alignment == 0 for tensor in theirs.values())
    np.testing.assert_array_equal(theirs["w.weight"].data, rows)
    np.testing.assert_array_equal(GGUFFile(path).vector("n.weight"), vector)


def test_a_tensor_of_another_size_than_planned_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(ModelError, match=r"w\.weight \(2, 32\) in F32 takes 256 bytes, but 128 were given"):
        write_gguf(path, {}, [(PLAN, np.zeros((1, 32), np.float32))])
    with pytest.raises(ModelError, match="1 planned tensors were not written"), GGUFOutput(path, {}, [PLAN]):
        pass
    with pytest.raises(ModelError, match="would be written twice"):
        write_gguf(path, {}, [(PLAN, np.zeros((2, 32), np.float32))] * 2)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with atomic_file(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


class _FullDisk(io.FileIO):
    """A file on a disk that takes 100 bytes more."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(memoryview(data).cast("B")) > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "open", lambda self, _mode: _FullDisk(self, "x"))
    with pytest.raises(ModelError, match=r"no space left on the disk.*is unchanged.*Free some space"):
        write_gguf(path, {"general.architecture": "x"}, [(PLAN, np.zeros((2, 32), np.float32))])
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_too_little_space_is_told_before_the_work(tmp_path: Path) -> None:
    plan = TensorPlan(name="w.weight", shape=(1 << 40, 4096), format="F32")
    with (
        pytest.raises(ModelError, match=r"but only .* MB are free"),
        GGUFOutput(tmp_path / "x.gguf", {}, [plan]),
    ):
        pytest.fail("not reached")
    assert list(tmp_path.iterdir()) == []


def test_the_operating_system_refusing_a_write(tmp_path: Path) -> None:
    """A real limit (RLIMIT_FSIZE), in another process since it cannot be taken back."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    script = f"""
import resource, pathlib, numpy as np
from retrograd.gguf.writer import TensorPlan, write_gguf
from retrograd_hookspecs import ModelError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
plan = TensorPlan(name="w.weight", shape=(64, 4096), format="F32")
try:
    write_gguf(pathlib.Path({str(path)!r}), {{}}, [(plan, np.zeros((64, 4096), np.float32))])
except ModelError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (
        "cannot write: File too large; the file that had this name before, if any, is unchanged"
        in done.stdout
    )
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot write"):
        write_gguf(tmp_path / "file" / "x.gguf", {}, [])
