"""The page that shows a recorded run: `index.html`, and its data in scripts that a browser loads from disk.

A page opened from disk may not read the files beside it, but it may load scripts. So the records are kept a
second time, packed, as scripts: summaries of all groups, a few large files, and the records of each group
in a file of its own, loaded when somebody looks at it. `index.js` names them; the page loads it again and
again to follow a run. All of it is made from `observe.jsonl` alone, and can be made again.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import attrs

from .records import VERSION, Record
from .summary import GroupSummary
from .viewer import page_html

DATA = "observe-data"
INDEX = "index.js"
PAGE = "index.html"
CHUNK_BYTES = 400_000
"""Summaries in one file, in bytes before packing."""
GROUPS_PER_FOLDER = 1000


@attrs.define
class _Chunk:
    """A file of summaries; `bytes` of `observe.jsonl` and `groups` were on the page before it."""

    name: str
    bytes: int
    groups: int
    revision: int = 0


@attrs.define
class _State:
    """What `index.js` says: the first `bytes` of `observe.jsonl`, with `groups`, are on the page."""

    build: str
    bytes: int = 0
    groups: int = 0
    chunks: list[_Chunk] = attrs.field(factory=list)


class Page:
    """Brings the page of one `observe.jsonl` up to date, in that file's directory or in another."""

    def __init__(self, journal: Path, directory: Path | None = None) -> None:
        self._journal = journal
        self.directory = directory or journal.parent
        self._data = self.directory / DATA
        self._state: _State | None = None
        self._rows: list[bytes] = []
        self._rows_bytes = 0

    def catch_up(self) -> None:
        """Add every update that was recorded since. Raises `OSError`; the next call then goes on."""
        state = self._current_state()
        try:
            self._add(state)
        except BaseException:
            self._state = None  # what is on the disk counts
            raise

    def is_complete(self) -> bool:
        """True if the page on the disk shows every record."""
        stored = _stored_state(self._data / INDEX)
        return stored is not None and stored.bytes == self._journal.stat().st_size

    def _current_state(self) -> _State:
        size = self._journal.stat().st_size
        state = self._state
        if state is not None and state.bytes <= size and (self._data / INDEX).exists():
            return state
        stored = _stored_state(self._data / INDEX)
        if stored is None or stored.bytes > size:
            shutil.rmtree(self._data, ignore_errors=True)
            stored = _State(build=uuid4().hex[:8])
        self._data.mkdir(parents=True, exist_ok=True)
        _replace(self.directory / PAGE, page_html().encode())
        if stored.chunks:
            # The last file may hold more than the index knew of when writing ended: make it again.
            stored.bytes, stored.groups = stored.chunks[-1].bytes, stored.chunks[-1].groups
            self._rows, self._rows_bytes = [], 0
        else:
            self._new_chunk(stored)
        self._state = stored
        return stored

    def _new_chunk(self, state: _State) -> None:
        name = f"summary-{len(state.chunks):05d}"
        state.chunks.append(_Chunk(name, state.bytes, state.groups))
        self._rows, self._rows_bytes = [], 0

    def _add(self, state: _State) -> None:
        added = False
        for end, lines in _batches(self._journal, state.bytes):
            self._add_batch(state, lines)
            state.bytes = end
            added = True
            if self._rows_bytes >= CHUNK_BYTES:
                self._write_chunk(state)
                self._new_chunk(state)
        if added:
            self._write_chunk(state)
            _replace(self._data / INDEX, _index_script(state))

    def _add_batch(self, state: _State, lines: list[tuple[Record, bytes]]) -> None:
        """The records from one `update`, `evaluation`, `run` or `gap` record to the next."""
        *parts, (closing, _) = lines
        groups: list[tuple[GroupSummary, list[bytes]]] = []
        for record, text in parts:
            if record["kind"] == "prompt":
                groups.append((GroupSummary(), []))
            if groups:
                summary, texts = groups[-1]
                summary.add(record)
                texts.append(text)
        for summary, texts in groups:
            name = f"{state.groups // GROUPS_PER_FOLDER:04d}/{state.groups % GROUPS_PER_FOLDER:03d}"
            self._write_script(f"groups/{name}", b"[" + b",".join(texts) + b"]")
            self._row({**summary.row(), "file": f"groups/{name}"})
            state.groups += 1
        self._row(closing)

    def _row(self, record: Record) -> None:
        row = json.dumps(record, separators=(",", ":")).encode()
        self._rows.append(row)
        self._rows_bytes += len(row)

    def _write_chunk(self, state: _State) -> None:
        if not self._rows:
            return
        chunk = state.chunks[-1]
        self._write_script(chunk.name, b"[" + b",".join(self._rows) + b"]")
        chunk.revision += 1

    def _write_script(self, name: str, data: bytes) -> None:
        """A script that hands packed JSON to the page: it holds nothing but base64."""
        packed = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
        path = self._data / f"{name}.js"
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, f'retrogradData("{name}","{packed}");\n'.encode())


def _batches(path: Path, start: int) -> Iterator[tuple[int, list[tuple[Record, bytes]]]]:
    """The records of each whole batch from a byte on, with where it ends.

    The records of an update that a kill cut short have no end; they are in the file, not on the page.
    """
    batch: list[tuple[Record, bytes]] = []
    position = start
    with path.open("rb") as file:
        file.seek(start)
        for text in file:
            if not text.endswith(b"\n"):
                return
            position += len(text)
            record = _record(text)
            if record is None:
                continue
            if record["kind"] == "run":
                batch = []
            batch.append((record, text.rstrip()))
            if record["kind"] in ("run", "update", "evaluation", "gap"):
                yield position, batch
                batch = []


def _record(text: bytes) -> Record | None:
    """A record of this version; None for anything else, such as one that an editor broke."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if isinstance(record, dict) and record.get("v") == VERSION and isinstance(record.get("kind"), str):
        return record
    return None


def _index_script(state: _State) -> bytes:
    record = {"v": VERSION, **attrs.asdict(state)}
    record["chunks"] = [chunk for chunk in record["chunks"] if chunk["revision"]]
    return f"retrogradIndex({json.dumps(record)});\n".encode()


def _stored_state(path: Path) -> _State | None:
    """The state of an earlier process; None if there is none that can be read."""
    try:
        text = path.read_text()
        record: dict[str, Any] = json.loads(text[text.index("(") + 1 : text.rindex(")")])
        if record.pop("v") != VERSION:
            return None
        state = _State(**record)
        state.chunks = [_Chunk(**chunk) for chunk in record["chunks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: a browser may be reading it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
