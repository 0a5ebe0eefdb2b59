"""`hf:` through the real huggingface_hub, against a small server that speaks the Hub's download protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from retrograd_hookspecs import ModelError
from retrograd_plugins.model_sources.hf import HuggingFaceSource, retrograd_model_sources

COMMIT = "a" * 40
FILES = {
    "/own/repo/resolve/main/m.gguf": b"GGUF one",
    "/own/repo/resolve/v2/sub/m.gguf": b"GGUF two",
    "/own/repo/resolve/main/s-00001-of-00002.gguf": b"GGUF part 1",
    "/own/repo/resolve/main/s-00002-of-00002.gguf": b"GGUF part 2",
}


class _Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        data = FILES.get(self.path)
        if data is None:
            repository = self.path.startswith("/own/repo/")
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if repository else "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(locator: str, endpoint: str, home: Path, *, offline: bool = False) -> tuple[str, str]:
    """Contents of the file and the error text. In a new process: the library reads its settings on import."""
    script = (
        "import sys, json\n"
        "from retrograd_plugins.model_sources.hf import HuggingFaceSource\n"
        "from retrograd_hookspecs import ModelError\n"
        "try:\n"
        "    path = HuggingFaceSource().resolve(sys.argv[1])\n"
        "    print(json.dumps([path.read_text(), ' '.join(sorted(p.name for p in path.parent.iterdir()))]))\n"
        "except ModelError as error:\n"
        "    print(json.dumps(['', str(error)]))\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment["HF_HUB_OFFLINE"] = "1" if offline else "0"
    done = subprocess.run(
        [sys.executable, "-c", script, locator], env=environment, capture_output=True, text=True, check=True
    )
    contents, text = json.loads(done.stdout.splitlines()[-1])
    return contents, text


def test_files_revisions_and_split_models(hub: str, tmp_path: Path) -> None:
    assert resolve("hf:own/repo/m.gguf", hub, tmp_path)[0] == "GGUF one"
    assert resolve("hf:own/repo@v2/sub/m.gguf", hub, tmp_path)[0] == "GGUF two"
    contents, beside = resolve("hf:own/repo/s-00002-of-00002.gguf", hub, tmp_path)
    assert contents == "GGUF part 2"
    assert "s-00001-of-00002.gguf" in beside


def test_what_does_not_exist_is_named(hub: str, tmp_path: Path) -> None:
    assert "own/repo has no file x.gguf" in resolve("hf:own/repo/x.gguf", hub, tmp_path)[1]
    assert "there is no repository no/body" in resolve("hf:no/body/x.gguf", hub, tmp_path)[1]


def test_offline_the_cache_serves_and_the_rest_is_told(hub: str, tmp_path: Path) -> None:
    resolve("hf:own/repo/m.gguf", hub, tmp_path)
    assert resolve("hf:own/repo/m.gguf", hub, tmp_path, offline=True)[0] == "GGUF one"
    error = resolve("hf:own/repo@v2/sub/m.gguf", hub, tmp_path, offline=True)[1]
    assert "is not in the local cache and the Hub cannot be reached" in error


@pytest.mark.parametrize("locator", ["hf:repo/m.gguf", "hf:own/repo", "hf:own/repo/m.safetensors"])
def test_malformed_locators(locator: str) -> None:
    with pytest.raises(ModelError, match="a Hub locator is hf:OWNER/REPO"):
        HuggingFaceSource().resolve(locator)


def test_without_the_package_the_pip_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'retrograd\[hf\]'"):
        HuggingFaceSource().resolve("hf:own/repo/m.gguf")
    (component,) = retrograd_model_sources()
    assert (component.extra, component.requires) == ("hf", ("huggingface_hub",))
