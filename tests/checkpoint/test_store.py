"""The checkpoint store: exact, checked, and never half-written."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.checkpoint import Checkpoint, CheckpointStore, signature_differences
from retrograd_hookspecs import CheckpointError, ModelError


def checkpoint(step: int = 1, size: int = 1000) -> Checkpoint:
    rng = np.random.default_rng(step)
    return Checkpoint(
        signature={"model": "sha", "training": {"lr": 1e-4, "targets": ["q", "k"]}},
        state={
            "driver": {"step": step, "best_score": None},
            "algorithm": {"cursor": step * 3, "rng": rng.bit_generator.state, "lr": 0.1 + 0.2},
        },
        tensors={
            "parameter/a": rng.standard_normal((size, 3)).astype(np.float32),
            "parameter/scalar": np.array(7.5, np.float32),
            "optimizer/first_moment/a": rng.standard_normal(size).astype(np.float32),
            "optimizer/count": np.array([step], np.int64),
        },
    )


def same(first: Checkpoint, second: Checkpoint) -> bool:
    return (
        first.signature == second.signature
        and first.state == second.state
        and first.tensors.keys() == second.tensors.keys()
        and all(
            a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            for a, b in ((first.tensors[name], second.tensors[name]) for name in first.tensors)
        )
    )


def adapter(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip_is_exact(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "a" / "b")
    path = store.save("step-000007", checkpoint(7), adapter=adapter("weights"))
    assert path == tmp_path / "a" / "b" / "step-000007.state"
    assert same(store.load(path), checkpoint(7))
    assert names(path.parent) == ["step-000007.gguf", "step-000007.state"]
    assert names(path) == ["state.json", "tensors.safetensors"]
    assert (path.parent / "step-000007.gguf").read_text() == "weights"


def test_arrays_that_are_not_contiguous_are_written_by_value(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = store.save("best", Checkpoint(signature={}, state={}, tensors={"t": array.T, "s": array[:, 1]}))
    loaded = store.load(path).tensors
    assert np.array_equal(loaded["t"], array.T)
    assert np.array_equal(loaded["s"], array[:, 1])


def test_random_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rng.random(17)
    store = CheckpointStore(tmp_path)
    state = {"rng": rng.bit_generator.state}
    path = store.save("best", Checkpoint(signature={}, state=state, tensors={}))
    expected = rng.random(100)
    other = np.random.default_rng(0)
    other.bit_generator.state = store.load(path).state["rng"]
    assert np.array_equal(other.random(100), expected)


def test_newest_is_the_step_written_last_and_best_only_without_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.newest() is None
    store.save("best", checkpoint())
    newest = store.newest()
    assert newest is not None
    assert newest.name == "best.state"
    # 900 and 1,000,000 are of an earlier run in the same directory.
    for name in ("step-000900", "step-1000000", "step-000100"):
        store.save(name, checkpoint())
        time.sleep(0.02)  # beyond the resolution of the file system's clock
    (store.directory / "step-9999999.state").write_text("a file is no checkpoint")
    assert [p.name for p in store.paths()] == [
        "step-000100.state",
        "step-1000000.state",
        "step-000900.state",
        "best.state",
    ]


def test_saving_again_replaces(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save("best", checkpoint(step), adapter=adapter(str(step)))
        assert same(store.load(tmp_path / "best.state"), checkpoint(step))
        assert (tmp_path / "best.gguf").read_text() == str(step)
    assert names(tmp_path) == ["best.gguf", "best.state"]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../x", "a b"])
def test_names_stay_in_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        CheckpointStore(tmp_path).save(name, checkpoint())


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"b": [1, float("nan")]}}, r"state\.a\.b\[1\]: nan"),
        ({"a": np.int64(3)}, r"state\.a: .*int64"),
        ({"a": Path("x")}, r"state\.a"),
        ({1: 2}, r"the key 1 is not a string"),
    ],
)
def test_state_that_json_cannot_hold_is_named(tmp_path: Path, state: Any, where: str) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=where):
        store.save("best", Checkpoint(signature={}, state=state, tensors={}))
    assert names(tmp_path) == []


def test_differing_fields_are_listed() -> None:
    saved = {"model": {"sha": "a", "name": "x"}, "lr": 1e-4, "data": "1", "gone": True, "targets": ["q", "k"]}
    now = {"model": {"sha": "b", "name": "x"}, "lr": 0.001, "data": "1", "new": None, "targets": ("q", "k")}
    assert signature_differences(saved, now) == [
        "gone: true in the checkpoint, absent now",
        "lr: 0.0001 in the checkpoint, 0.001 now",
        'model.sha: "a" in the checkpoint, "b" now',
        "new: absent in the checkpoint, null now",
    ]
    assert signature_differences({"a": 1, "b": {}}, {"a": 1, "b": {}}) == []
    assert signature_differences({"a": {}}, {"a": {"b": 1}}) != []
    assert signature_differences({"a": 1}, {"a": 1.0}) != []
    assert signature_differences({"a": True}, {"a": 1}) != []


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    found = checkpoint()
    found.require_signature({"model": "sha", "training": {"lr": 1e-4, "targets": ["q", "k"]}}, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        found.require_signature({"model": "other", "training": {"lr": 1e-4, "targets": ["q"]}}, tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert 'model: "sha" in the checkpoint, "other" now' in message
    assert 'training.targets: ["q", "k"] in the checkpoint, ["q"] now' in message
    assert "lr" not in message


def damage_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: damage_byte(p / "tensors.safetensors", -1), r"tensors.safetensors is missing or damaged"),
        (lambda p: os.truncate(p / "tensors.safetensors", 100), r"tensors.safetensors is missing or damaged"),
        (lambda p: (p / "tensors.safetensors").unlink(), r"tensors.safetensors is missing or damaged"),
        (lambda p: (p / "state.json").unlink(), r"state.json is missing or damaged"),
        (lambda p: os.truncate(p / "state.json", 200), r"state.json is missing or damaged"),
        (
            lambda p: replace_text(p / "state.json", '"step": 2', '"step": 3'),
            r"state.json is damaged: its checksum",
        ),
        (lambda p: (p / "state.json").write_text("{}"), r"is not the state of a checkpoint"),
        (
            lambda p: replace_text(p / "state.json", '"format": 1', '"format": 9'),
            r"format 9 is not known",
        ),
    ],
)
def test_damage_is_found_and_another_checkpoint_named(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    store = CheckpointStore(tmp_path)
    older = store.save("step-000001", checkpoint(1))
    newer = store.save("step-000002", checkpoint(2))
    damage(newer)
    with pytest.raises(CheckpointError, match=message) as caught:
        store.load(newer)
    assert f"another one is {older}" in str(caught.value)
    assert same(store.load(older), checkpoint(1))


def test_missing_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path / "step-000001.state", tmp_path / "no" / "dir.state"):
        with pytest.raises(CheckpointError, match="there is no such checkpoint"):
            CheckpointStore(path.parent).load(path)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """No file can grow beyond `limit` bytes: writes fail in the middle, as on a full disk."""
    old_signal = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old_signal)


@pytest.mark.parametrize("limit", [50, 600, 5_000])
def test_disk_that_fills_up_while_writing(tmp_path: Path, limit: int) -> None:
    store = CheckpointStore(tmp_path)
    store.save("best", checkpoint(1), adapter=adapter("one"))
    store.save("step-000001", checkpoint(1))
    before = names(tmp_path)
    with file_size_limit(limit):
        for name in ("best", "step-000002"):
            with pytest.raises(CheckpointError, match=r"cannot be written.*earlier.* intact.*free"):
                store.save(name, checkpoint(2), adapter=adapter("two"))
    assert names(tmp_path) == before
    assert same(store.load(tmp_path / "best.state"), checkpoint(1))
    assert (tmp_path / "best.gguf").read_text() == "one"
    store.save("step-000002", checkpoint(2))


class FailsAt:
    """Calls `original`, except that call number `number` (from 0) finds the disk full."""

    def __init__(self, original: Callable[..., Any], number: int) -> None:
        self._original = original
        self._number = number
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self._number + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._original(*args, **kwargs)


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_error_at_any_call_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The n-th call of fsync, rename or mkdir fails, for every n, until n exceeds the calls of a save."""
    number = 0
    while True:
        directory = tmp_path / str(number)
        store = CheckpointStore(directory)
        store.save("best", checkpoint(1), adapter=adapter("one"))
        error = ""
        with monkeypatch.context() as patch:
            fails = FailsAt(getattr(os, call), number)
            patch.setattr(os, call, fails)
            try:
                store.save("best", checkpoint(2), adapter=adapter("two"))
            except CheckpointError as caught:
                error = str(caught)
        after = CheckpointStore(directory)
        after.recover()
        found = after.load(directory / "best.state")
        assert names(directory) == ["best.gguf", "best.state"]
        if not error:
            assert same(found, checkpoint(2))
        if fails.calls <= number:
            assert not error
            break
        assert same(found, checkpoint(1)) or same(found, checkpoint(2))
        number += 1
    assert number >= 2, f"a save calls {call} only {number} times: this test no longer tests anything"


def test_adapter_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def refuses(path: Path) -> None:
        path.write_text("half")
        raise ModelError("cannot be saved")

    store = CheckpointStore(tmp_path)
    with pytest.raises(ModelError):
        store.save("best", checkpoint(), adapter=refuses)
    assert names(tmp_path) == []


def leave_temporary_files(directory: Path) -> None:
    """As a process killed in the middle of writing `step-000003`."""
    half = directory / ".step-000003.state.tmp"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    (directory / ".step-000003.gguf.tmp").write_bytes(b"half")
    (directory / ".step-000003.gguf.tmp.tmp").write_bytes(b"half")


def test_leftovers_are_invisible_and_cleared_by_the_next_save(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save("step-000001", checkpoint(1))
    leave_temporary_files(tmp_path)
    store = CheckpointStore(tmp_path)
    assert [path.name for path in store.paths()] == ["step-000001.state"]
    store.save("step-000002", checkpoint(2))
    assert names(tmp_path) == ["step-000001.state", "step-000002.state"]


def test_reading_changes_nothing(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save("step-000001", checkpoint(1))
    leave_temporary_files(tmp_path)
    before = names(tmp_path)
    reader = CheckpointStore(tmp_path)
    reader.load(path)
    reader.newest()
    assert names(tmp_path) == before


def test_interrupted_exchange_is_undone_or_finished(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save("best", checkpoint(1))
    (tmp_path / "best.state").rename(tmp_path / ".best.state.old")
    CheckpointStore(tmp_path).recover()
    assert same(store.load(tmp_path / "best.state"), checkpoint(1))
    (tmp_path / ".best.state.old").mkdir()
    CheckpointStore(tmp_path).recover()
    assert names(tmp_path) == ["best.state"]


def test_adapter_of_a_finished_checkpoint_gets_its_name(tmp_path: Path) -> None:
    """Killed between the rename of the state and that of the adapter."""
    store = CheckpointStore(tmp_path)
    store.save("best", checkpoint(1), adapter=adapter("one"))
    (tmp_path / "best.gguf").rename(tmp_path / ".best.gguf.tmp")
    (tmp_path / "best.gguf").write_text("of an older best")
    CheckpointStore(tmp_path).recover()
    assert names(tmp_path) == ["best.gguf", "best.state"]
    assert (tmp_path / "best.gguf").read_text() == "one"


def test_state_file_is_readable_json(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save("best", checkpoint(4))
    document = json.loads((path / "state.json").read_text())
    assert document["state"]["driver"]["step"] == 4
    assert document["signature"]["training"]["lr"] == 1e-4
