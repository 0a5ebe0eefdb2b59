"""The data of the page, without a browser: it follows from the records, whatever happened to it."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from retrograd.observe import page
from retrograd.observe.page import Page
from retrograd.observe.viewer import page_html

from .examples import read, record_sums


def unpack(path: Path) -> Any:
    """The JSON in a script."""
    found = re.fullmatch(r'retrogradData\("([\w/-]+)","([A-Za-z0-9+/=]+)"\);\n', path.read_text())
    assert found, path
    return json.loads(gzip.decompress(base64.b64decode(found[2])))


def index(directory: Path) -> dict[str, Any]:
    text = (directory / "observe-data" / "index.js").read_text()
    found: dict[str, Any] = json.loads(text.removeprefix("retrogradIndex(").removesuffix(");\n"))
    return found


def rows(directory: Path) -> list[dict[str, Any]]:
    """All summaries, in order."""
    data = directory / "observe-data"
    return [row for chunk in index(directory)["chunks"] for row in unpack(data / f"{chunk['name']}.js")]


def content(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Everything that the page shows."""
    found = rows(directory)
    files = [row["file"] for row in found if row["kind"] == "group"]
    return found, {file: unpack(directory / "observe-data" / f"{file}.js") for file in files}


@pytest.fixture
def directory(sums: Path, tmp_path: Path) -> Path:
    """A copy of the example that may be changed."""
    return Path(shutil.copytree(sums, tmp_path / "observe"))


def test_summaries_and_details_hold_the_records(sums: Path) -> None:
    records = read(sums)
    found, details = content(sums)
    kept = ("run", "update", "evaluation", "gap")
    assert [row for row in found if row["kind"] != "group"] == [r for r in records if r["kind"] in kept]
    groups = [row for row in found if row["kind"] == "group"]
    assert len(groups) == 14 * 6
    assert [r for file in details.values() for r in file] == [r for r in records if r["kind"] not in kept]
    outcomes = {
        (r["segment"], r["update"], r["group"], r["member"]): r for r in records if r["kind"] == "outcome"
    }
    for row in groups:
        assert len(row["members"]) == 8
        for member in row["members"]:
            outcome = outcomes[row["segment"], row["update"], row["group"], member["id"]]
            assert member["total"] == outcome["total"]
            assert member["reward"] == outcome["reward"].get("value", outcome["reward"]["kind"])


def test_the_index_covers_the_whole_file(sums: Path) -> None:
    assert index(sums)["bytes"] == (sums / "observe.jsonl").stat().st_size
    assert Page(sums / "observe.jsonl").is_complete()


def test_summaries_are_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "CHUNK_BYTES", 3000)
    record_sums(tmp_path, 8, groups=2, size=4)
    assert len(index(tmp_path)["chunks"]) > 3
    assert [row["update"] for row in rows(tmp_path) if row["kind"] == "update"] == list(range(1, 9))


def test_a_page_is_made_again_from_the_records(directory: Path) -> None:
    before = content(directory)
    shutil.rmtree(directory / "observe-data")
    (directory / "index.html").unlink()
    Page(directory / "observe.jsonl").catch_up()
    assert content(directory) == before
    assert (directory / "index.html").read_text() == page_html()


@pytest.mark.parametrize("text", ["", "retrogradIndex(", 'retrogradIndex({"v": 2});', "retrogradIndex([]);"])
def test_an_index_that_cannot_be_read_is_made_again(directory: Path, text: str) -> None:
    before = content(directory)
    (directory / "observe-data" / "index.js").write_text(text)
    Page(directory / "observe.jsonl").catch_up()
    assert content(directory) == before


def test_a_shorter_file_makes_a_new_page(directory: Path) -> None:
    """Somebody put another `observe.jsonl` there."""
    build = index(directory)["build"]
    lines = (directory / "observe.jsonl").read_bytes().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if b'"kind":"update"' in line]
    (directory / "observe.jsonl").write_bytes(b"".join(lines[: ends[2] + 1]))
    Page(directory / "observe.jsonl").catch_up()
    assert [row["update"] for row in rows(directory) if row["kind"] == "update"] == [1, 2, 3]
    assert index(directory)["build"] != build


def test_files_newer_than_the_index_are_no_harm(directory: Path, tmp_path: Path) -> None:
    """Writing ended between a file of summaries and the index: nothing is there twice."""
    before = content(directory)
    half = tmp_path / "half"
    half.mkdir()
    lines = (directory / "observe.jsonl").read_bytes().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if b'"kind":"update"' in line]
    (half / "observe.jsonl").write_bytes(b"".join(lines[: ends[4] + 1]))
    Page(half / "observe.jsonl").catch_up()
    old_index = (half / "observe-data" / "index.js").read_bytes()
    (half / "observe.jsonl").write_bytes(b"".join(lines))
    Page(half / "observe.jsonl").catch_up()
    (half / "observe-data" / "index.js").write_bytes(old_index)
    Page(half / "observe.jsonl").catch_up()
    assert content(half) == before


def test_nothing_new_changes_nothing(directory: Path) -> None:
    shown = Page(directory / "observe.jsonl")
    shown.catch_up()
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    shown.catch_up()
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_lines_that_are_no_records_are_passed_over(directory: Path) -> None:
    before = content(directory)
    lines = (directory / "observe.jsonl").read_bytes().splitlines(keepends=True)
    lines[5:5] = [b"not JSON\n", b'{"v":99,"kind":"future"}\n', b"[]\n", b'{"v":1}\n']
    (directory / "observe.jsonl").write_bytes(b"".join(lines))
    shutil.rmtree(directory / "observe-data")
    Page(directory / "observe.jsonl").catch_up()
    assert content(directory) == before


def test_the_page_is_one_file_that_asks_for_nothing() -> None:
    html = page_html()
    assert "/*" + "script*/" not in html
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", html)
    assert "@import" not in html
    assert html.count("http://") == html.count("http://www.w3.org/2000/svg")
    assert "https://" not in html


def test_the_page_never_parses_what_it_shows() -> None:
    """Models write what is shown: it may become text and attributes only."""
    html = page_html()
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
    ):
        assert way not in html
    assert "default-src 'none'" in html
    assert "'unsafe-inline'" not in html.split("script-src", 1)[1].split(";", 1)[0]
