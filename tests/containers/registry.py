"""A registry of container images on this host, for tests of pulling: it has one image, and counts requests.

It answers what engines ask of OCI's distribution specification when they pull. Docker takes a registry on a
loopback address without TLS.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar"


class Registry(ThreadingHTTPServer):
    """Serves blobs by digest. `requests` counts them by the kind of thing: `manifests` and `blobs`."""

    def __init__(self, config: bytes, layer: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: Counter[str] = Counter()
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, config),
            "layers": [_descriptor(_LAYER, layer)],
        }
        self.manifest = json.dumps(manifest).encode()
        self.blobs = {digest(data): data for data in (config, layer, self.manifest)}
        self.image = f"localhost:{self.server_address[1]}/sandbox:one"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        registry: Any = self.server
        parts = self.path.strip("/").split("/")
        kind, name = parts[-2:] if len(parts) > 2 else ("", "")
        is_manifest = kind == "manifests"
        data = registry.manifest if name == "one" and is_manifest else registry.blobs.get(name)
        if not kind:
            data = b"{}"  # GET /v2/: is this a registry?
        if send and kind:
            registry.requests[kind] += 1
        self.send_response(200 if data is not None else 404)
        data = data or b""
        self.send_header("Content-Type", _MANIFEST if is_manifest else "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        if is_manifest:
            self.send_header("Docker-Content-Digest", digest(data))
        self.end_headers()
        if send:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def registry(saved: bytes) -> Iterator[Registry]:
    """A registry with an image of one layer that no engine has: that of a tar of `docker save`, and some
    megabytes of chance.
    """
    with tarfile.open(fileobj=io.BytesIO(saved)) as tar:
        [image] = json.loads(_member(tar, "manifest.json"))
        config = json.loads(_member(tar, image["Config"]))
        [first] = image["Layers"]
        layer = io.BytesIO(_member(tar, first))
    with tarfile.open(fileobj=layer, mode="a") as tar:
        file = tarfile.TarInfo("chance")
        file.size = 3_000_000
        tar.addfile(file, io.BytesIO(os.urandom(file.size)))
    config["rootfs"]["diff_ids"] = [digest(layer.getvalue())]
    config["history"] = config.get("history", [])[:1]
    served = Registry(json.dumps(config).encode(), layer.getvalue())
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield served
    finally:
        served.shutdown()
        served.server_close()
        thread.join()


def digest(data: bytes) -> str:
    """As registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(kind: str, data: bytes) -> Mapping[str, Any]:
    return {"mediaType": kind, "size": len(data), "digest": digest(data)}


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()
