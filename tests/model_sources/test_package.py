"""`package:` finds files of installed distributions and packages without importing them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from retrograd_hookspecs import BuildContext, ModelError, NoConfig
from retrograd_plugins.model_sources.package import PackageSource, retrograd_model_sources


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """site-packages with the distribution `tiny-model` (package `tiny_model`), which fails when imported."""
    site = tmp_path / "site-packages"
    package, info = site / "tiny_model", site / "tiny_model-1.0.dist-info"
    (package / "data").mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "data" / "a.gguf").write_bytes(b"GGUF")
    (package / "b.gguf").write_bytes(b"GGUF")
    (package / "data" / "b.gguf").write_bytes(b"GGUF")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    files = [f"tiny_model/{name}" for name in ("__init__.py", "b.gguf", "data/a.gguf", "data/b.gguf")]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.mark.parametrize(
    ("locator", "path"),
    [
        ("package:tiny-model/tiny_model/data/a.gguf", "tiny_model/data/a.gguf"),
        ("package:tiny_model/data/a.gguf", "tiny_model/data/a.gguf"),
        ("package:tiny-model/a.gguf", "tiny_model/data/a.gguf"),
        ("package:tiny_model.data/a.gguf", "tiny_model/data/a.gguf"),
        ("package:tiny-model/b.gguf", "tiny_model/b.gguf"),
        ("package:tiny-model/data/b.gguf", "tiny_model/data/b.gguf"),
    ],
)
def test_found(installed: Path, locator: str, path: str) -> None:
    assert PackageSource().resolve(locator) == installed / path
    assert "tiny_model" not in sys.modules


def test_an_ambiguous_path_is_refused(installed: Path) -> None:
    (installed / "tiny_model" / "b.gguf").rename(installed / "tiny_model" / "more.gguf")
    (installed / "tiny_model" / "extra").mkdir()
    (installed / "tiny_model" / "extra" / "b.gguf").write_bytes(b"GGUF")
    with (installed / "tiny_model-1.0.dist-info" / "RECORD").open("a") as record:
        record.write("tiny_model/extra/b.gguf,,\n")
    with pytest.raises(ModelError, match=r"several files match: .*; give more of the path"):
        PackageSource().resolve("package:tiny-model/b.gguf")


def test_what_is_missing_is_named(installed: Path) -> None:
    with pytest.raises(ModelError, match=r"has no file c\.gguf; its models: .*tiny_model/data/a\.gguf"):
        PackageSource().resolve("package:tiny-model/c.gguf")
    with pytest.raises(ModelError, match=r"`pip install no-such`, or use pypi:no-such==VERSION/c\.gguf"):
        PackageSource().resolve("package:no-such/c.gguf")
    with pytest.raises(ModelError, match="must stay inside the package"):
        PackageSource().resolve("package:tiny-model/../secret.gguf")
    with pytest.raises(ModelError, match="a package locator is package:NAME"):
        PackageSource().resolve("package:tiny-model")


def test_registration(tmp_path: Path) -> None:
    (component,) = retrograd_model_sources()
    assert component.name == "package"
    context = BuildContext(config=None, base_dir=tmp_path)
    assert isinstance(component.build(NoConfig(), context), PackageSource)
