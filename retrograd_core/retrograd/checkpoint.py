"""Checkpoints on disk: written whole or not at all, checked when read.

`DIRECTORY/NAME.state/` holds `state.json` (signature, position, checksums) and `tensors.safetensors`
(masters of the trained weights, optimizer state); the adapter lies beside it as `DIRECTORY/NAME.gguf`.
Everything is written under a temporary name, flushed to the disk and renamed, so a name that exists is a
complete checkpoint, whatever killed the process. Names are `step-000123` and `best`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from retrograd_hookspecs import CheckpointError

FORMAT = 1
SUFFIX = ".state"
STATE_FILE = "state.json"
TENSOR_FILE = "tensors.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STEP = re.compile(r"step-(\d+)")


@attrs.frozen(eq=False, kw_only=True)
class Checkpoint:
    """What a run needs to go on. `signature` and `state` are JSON values, `tensors` host arrays by name."""

    signature: Mapping[str, Any]
    state: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]

    def require_signature(
        self, current: Mapping[str, Any], path: Path, *, may_grow: Collection[str] = ()
    ) -> None:
        """Raise `CheckpointError` with every differing field unless `current` equals the signature; numbers
        of the dotted fields `may_grow` may be larger."""
        differences = signature_differences(self.signature, current, may_grow=may_grow)
        if differences:
            raise CheckpointError(
                f"{path} was written by another run and cannot be resumed here:\n  "
                + "\n  ".join(differences)
                + "\nset these back, or start anew without --resume"
            )


class CheckpointStore:
    """The checkpoints of one directory. One run writes to a directory at a time.

    Reading changes nothing on disk; what a killed process left is cleared by the first `save`, or by
    `recover`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._recovered = False

    def save(
        self, name: str, checkpoint: Checkpoint, *, adapter: Callable[[Path], None] | None = None
    ) -> Path:
        """Write `NAME.state`, replacing one of that name, and return its path.

        `adapter` writes the adapter to the path it is given; it gets the name `NAME.gguf`.

        Raises: `CheckpointError` if anything cannot be written (disk full, not JSON); the checkpoints that
        were there before are untouched.
        """
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{name!r} cannot name a checkpoint: use letters, digits, '.', '_' and '-'")
        final = self.directory / (name + SUFFIX)
        temporary = self.directory / f".{name}{SUFFIX}.tmp"
        adapter_temporary = self._adapter_temporary(name)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self._recovered:
                self.recover()
            _remove(temporary)
            if adapter is not None:
                adapter(adapter_temporary)
                _sync_file(adapter_temporary)
            temporary.mkdir()
            self._write(temporary, checkpoint, adapter_temporary if adapter is not None else None)
            self._publish(temporary, final)
            if adapter is not None:
                os.replace(adapter_temporary, self.directory / f"{name}.gguf")
                _sync_directory(self.directory)
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            with contextlib.suppress(OSError):
                _remove(temporary)
                _remove(adapter_temporary)
            raise CheckpointError(
                f"{final}: the checkpoint cannot be written ({type(error).__name__}: {error}); earlier"
                " checkpoints are intact" + _free_space(self.directory)
            ) from error
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(temporary)
                _remove(adapter_temporary)
            raise
        return final

    def load(self, path: Path) -> Checkpoint:
        """Read and verify the `.state` directory `path`.

        Raises: `CheckpointError` if it is missing, incomplete, damaged or of another format version.
        """
        try:
            return self._load(path)
        except CheckpointError as error:
            others = [other for other in self.paths() if other != path]
            instead = f"; another one is {others[0]}" if others else ""
            raise CheckpointError(f"{error}{instead}") from error

    def signature(self, path: Path) -> dict[str, Any]:
        """The signature of the run that wrote `path`; its tensors are not read.

        Raises: `CheckpointError` if the state is missing or damaged.
        """
        signature: dict[str, Any] = _read_document(path / STATE_FILE)["signature"]
        return signature

    def newest(self) -> Path | None:
        """The `step-*.state` that was written last, else `best.state`, else None."""
        return next(iter(self.paths()), None)

    def paths(self) -> list[Path]:
        """All checkpoints: steps, the one written last first (a new run in a used directory begins at low
        steps again), then the others by name."""
        if not self.directory.is_dir():
            return []
        found = [
            path
            for path in self.directory.iterdir()
            if path.suffix == SUFFIX and not path.name.startswith(".") and path.is_dir()
        ]
        return sorted(found, key=_newest_first)

    def recover(self) -> None:
        """Clear what a killed process left: half-written files go, an interrupted exchange is finished."""
        self._recovered = True
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.glob(f".*{SUFFIX}.old")):
            final = self.directory / path.name.removeprefix(".").removesuffix(".old")
            if final.exists():
                _remove(path)
            else:
                os.replace(path, final)
        for path in self.directory.glob(f".*{SUFFIX}.tmp"):
            _remove(path)
        for path in self.directory.glob(".*.gguf.tmp*"):
            name = path.name.removeprefix(".").removesuffix(".gguf.tmp")
            if self._belongs(path, self.directory / (name + SUFFIX)):
                os.replace(path, self.directory / f"{name}.gguf")
            else:
                _remove(path)

    def _adapter_temporary(self, name: str) -> Path:
        return self.directory / f".{name}.gguf.tmp"

    def _write(self, directory: Path, checkpoint: Checkpoint, adapter: Path | None) -> None:
        tensors = {name: np.asarray(array, order="C") for name, array in checkpoint.tensors.items()}
        save_file(tensors, directory / TENSOR_FILE)
        _sync_file(directory / TENSOR_FILE)
        document: dict[str, Any] = {
            "format": FORMAT,
            "signature": _json_value(checkpoint.signature, "signature"),
            "state": _json_value(checkpoint.state, "state"),
            "tensors": _digest(directory / TENSOR_FILE),
            "adapter": _digest(adapter) if adapter is not None else None,
        }
        document["checksum"] = _checksum(document)
        with (directory / STATE_FILE).open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, allow_nan=False)
            file.write("\n")
        _sync_file(directory / STATE_FILE)
        _sync_directory(directory)

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give the finished directory its name. A directory cannot replace another one in one call, so the
        old one steps aside first; `recover` puts it back if the process dies in between."""
        old = self.directory / f".{final.name}.old"
        _remove(old)
        if final.exists():
            os.replace(final, old)
            try:
                os.replace(temporary, final)
            except OSError:
                os.replace(old, final)
                raise
        else:
            os.replace(temporary, final)
        _sync_directory(self.directory)
        _remove(old)

    def _load(self, path: Path) -> Checkpoint:
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: there is no such checkpoint (a checkpoint is a directory NAME{SUFFIX})"
            )
        document = _read_document(path / STATE_FILE)
        tensor_file = path / TENSOR_FILE
        if not tensor_file.is_file() or _digest(tensor_file) != document["tensors"]:
            raise CheckpointError(
                f"{tensor_file} is missing or damaged: its size or SHA-256 is not the recorded one"
            )
        try:
            tensors = load_file(tensor_file)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{tensor_file}: cannot be read: {error}") from error
        return Checkpoint(signature=document["signature"], state=document["state"], tensors=tensors)

    def _belongs(self, adapter: Path, state: Path) -> bool:
        """True if `adapter` is the very file that the checkpoint `state` was written with."""
        try:
            return bool(_read_document(state / STATE_FILE)["adapter"] == _digest(adapter))
        except CheckpointError:
            return False


def signature_differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, may_grow: Collection[str] = ()
) -> list[str]:
    """One line for each dotted field that differs: `training.lr: 0.0001 in the checkpoint, 0.001 now`. Those
    of `may_grow` differ only if they are smaller now."""
    before = dict(_flatten(_json_value(saved, "signature")))
    after = dict(_flatten(_json_value(current, "signature")))
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old = json.dumps(before[name], ensure_ascii=False) if name in before else "absent"
        new = json.dumps(after[name], ensure_ascii=False) if name in after else "absent"
        if old != new and not (name in may_grow and _grew(before.get(name), after.get(name))):
            lines.append(f"{name}: {old} in the checkpoint, {new} now")
    return lines


def _grew(before: Any, after: Any) -> bool:
    return isinstance(before, int) and isinstance(after, int) and after > before


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _flatten(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {error}") from error
    if not isinstance(document, dict) or "format" not in document:
        raise CheckpointError(f"{path} is not the state of a checkpoint")
    if document["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: format {document['format']!r} is not known (this version writes {FORMAT}); resume it"
            " with the version of retrograd that wrote it"
        )
    if document.pop("checksum", None) != _checksum(document):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return document


def _checksum(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _digest(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _json_value(value: Any, where: str) -> Any:
    """`value` as JSON reads it back. Raises `ValueError` that names the first value JSON cannot hold."""
    if isinstance(value, Mapping):
        result = {}
        for key, child in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: the key {key!r} is not a string")
            result[key] = _json_value(child, f"{where}.{key}")
        return result
    if isinstance(value, list | tuple):
        return [_json_value(child, f"{where}[{index}]") for index, child in enumerate(value)]
    if value is None or type(value) in (str, bool, int):
        return value
    if type(value) is float and value - value == 0.0:
        return value
    raise ValueError(f"{where}: {value!r} ({type(value).__name__}) is not a JSON value")


def _newest_first(path: Path) -> tuple[bool, int, int, str]:
    step = _step_of(path)
    try:
        written = (path / STATE_FILE).stat().st_mtime_ns
    except OSError:
        written = 0  # damaged: looked at last among the steps
    return step < 0, -written if step >= 0 else 0, -step, path.name


def _step_of(path: Path) -> int:
    match = _STEP.fullmatch(path.name.removesuffix(SUFFIX))
    return int(match.group(1)) if match else -1


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Renames reach the disk with the directory that holds the name.
_sync_directory = _sync_file


def _free_space(directory: Path) -> str:
    with contextlib.suppress(OSError):
        return f"; {shutil.disk_usage(directory).free / 2**20:.0f} MiB are free in {directory}"
    return ""
