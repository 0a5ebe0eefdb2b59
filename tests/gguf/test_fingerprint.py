"""Fingerprints are SHA-256 of the bytes, remembered, and never stale."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from retrograd.gguf import open_model
from retrograd.gguf.fingerprint import fingerprint
from retrograd.testing.models import write_tiny_model
from retrograd_hookspecs import ModelError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_what_sha256sum_prints(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    assert open_model(path).fingerprint() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_known_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    first = fingerprint([path])
    monkeypatch.setattr(hashlib, "sha256", _only_for_keys(hashlib.sha256))
    assert fingerprint([path]) == first


def test_an_open_file_is_read_once_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint and adapter names its base: a model of gigabytes must not be read for each of them."""
    (tmp_path / "no-directory").touch()
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path / "no-directory"))
    file = open_model(write_tiny_model(tmp_path / "m.gguf"))
    first = file.fingerprint()
    monkeypatch.setattr(hashlib, "sha256", _only_for_keys(hashlib.sha256))
    assert file.fingerprint() == first


def _only_for_keys(real: object) -> object:
    """SHA-256 that may be given its data at once (names), but not be fed a file."""

    def make(data: bytes | None = None) -> object:
        assert data is not None, "the file was read again"
        return real(data)  # type: ignore[operator]

    return make


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", seed=1)
    first = fingerprint([path])
    write_tiny_model(path, seed=2)
    second = fingerprint([path])
    assert first != second
    # Same size, same inode, another time.
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(1, 1))
    assert fingerprint([path]) not in (first, second)


def test_a_damaged_record_is_ignored(tmp_path: Path, cache: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    first = fingerprint([path])
    (record,) = (cache / "fingerprints").iterdir()
    record.write_text("{")
    assert fingerprint([path]) == first


def test_a_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert fingerprint([path]) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf: cannot read"):
        fingerprint([tmp_path / "absent.gguf"])
