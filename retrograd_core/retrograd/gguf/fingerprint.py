"""SHA-256 of model files, remembered between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from retrograd.cache import cache_dir
from retrograd_hookspecs import ModelError

from .writer import atomic_file

_log = logging.getLogger(__name__)

Identity = list[list[str | int]]
"""Path, size in bytes, modification time in ns and inode of each file."""


def fingerprint(paths: Sequence[Path]) -> str:
    """Hex SHA-256 of the bytes of `paths`, one after another.

    A file whose size, modification time and inode are as they were when it was last hashed is not read
    again. Raises `ModelError` if a file cannot be read.
    """
    try:
        stats = [path.stat() for path in paths]
        identity: Identity = [
            [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
            for path, stat in zip(paths, stats, strict=True)
        ]
        record = _record(identity)
        known = _read(record, identity)
        if known is not None:
            return known
        digest = hashlib.sha256()
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(1 << 22):
                    digest.update(chunk)
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot read: {error.strerror or error}") from error
    result = digest.hexdigest()
    _write(record, identity, result)
    return result


def _record(identity: Identity) -> Path:
    key = hashlib.sha256(json.dumps([entry[0] for entry in identity]).encode()).hexdigest()
    return cache_dir() / "fingerprints" / f"{key[:32]}.json"


def _read(record: Path, identity: Identity) -> str | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        stored = json.loads(record.read_text())
        if stored["files"] == identity and len(stored["sha256"]) == 64:
            return str(stored["sha256"])
    return None


def _write(record: Path, identity: Identity, digest: str) -> None:
    # Only speed depends on the record, so a read-only home is no reason to stop.
    try:
        with atomic_file(record) as file:
            file.write(json.dumps({"files": identity, "sha256": digest}).encode())
    except ModelError as error:
        _log.debug("the fingerprint is not remembered: %s", error)
