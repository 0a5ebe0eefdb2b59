"""Disks that fail: the run goes on, whole records stay whole, and what is lost is counted."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retrograd.observe import Observer
from retrograd.observe.page import Page

from .examples import FACTS, decode, group, read, rollout, until


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def observe(messages: list[str]) -> Callable[[Path], Observer]:
    def make(directory: Path) -> Observer:
        observer = Observer(directory, FACTS, decode=decode, message=messages.append)
        observer.run(settings={})
        until(lambda: observer._page is not None or bool(messages))
        return observer

    return make


def update(observer: Observer, number: int) -> None:
    """An update of 5 records: one group with one member, and the update itself."""
    observer.update(number, [group(f"g{number}", [rollout("a", ["yes"], total=1.0)])], {"m": float(number)})
    until(lambda: not observer._jobs)


def updates(directory: Path) -> list[int]:
    return [record["update"] for record in read(directory) if record["kind"] == "update"]


def test_a_full_disk(tmp_path: Path, messages: list[str], observe: Callable[[Path], Observer]) -> None:
    """`/dev/full` takes nothing; then the file is on a disk with room again."""
    file = tmp_path / "observe.jsonl"
    file.symlink_to("/dev/full")
    observer = observe(tmp_path)
    update(observer, 1)
    update(observer, 2)
    assert len(messages) == 1
    assert "No space left on device" in messages[0]
    file.unlink()
    update(observer, 3)
    update(observer, 4)
    observer.close()
    found = read(tmp_path)
    assert [record["kind"] for record in found[:3]] == ["run", "gap", "prompt"]
    assert found[1]["records"] == 10
    assert "No space left on device" in found[1]["reason"]
    assert updates(tmp_path) == [3, 4]
    assert len(messages) == 2
    assert "10 records were dropped (No space left on device" in messages[1]


def test_a_disk_that_stays_full(
    tmp_path: Path, messages: list[str], observe: Callable[[Path], Observer]
) -> None:
    (tmp_path / "observe.jsonl").symlink_to("/dev/full")
    observer = observe(tmp_path)
    for number in range(1, 6):
        update(observer, number)
    observer.close()
    assert len(messages) == 2
    assert "25 records were dropped" in messages[1]


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """The file may not grow beyond a size in the middle of an update; later it may."""
    script = f"""
import resource, sys
from pathlib import Path
from tests.observe.examples import *
said = []
observer = Observer(Path({str(tmp_path)!r}), FACTS, decode=decode, message=said.append)
observer.run(settings={{}})
def update(number):
    made = [sum_group(number, 0)]
    observer.update(number, made, {{"m": 1.0}})
    until(lambda: not observer._jobs)
update(1)
size = (Path({str(tmp_path)!r}) / "observe.jsonl").stat().st_size
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
update(2)
assert (Path({str(tmp_path)!r}) / "observe.jsonl").stat().st_size == size
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
update(3)
observer.close()
assert len(said) == 2 and "File too large" in said[0], said
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert updates(tmp_path) == [1, 3]
    gaps = [record["records"] for record in read(tmp_path) if record["kind"] == "gap"]
    assert gaps == [19]  # a prompt, 8 rollouts, 8 outcomes, a selection, the update
    assert Page(tmp_path / "observe.jsonl").is_complete()


def test_a_directory_that_cannot_be_made(
    tmp_path: Path, messages: list[str], observe: Callable[[Path], Observer]
) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = tmp_path / "file" / "observe"
    observer = observe(directory)
    update(observer, 1)
    update(observer, 2)
    observer.close()
    assert len(messages) == 2
    assert f"recording into {directory} fails (Not a directory" in messages[0]
    assert "10 records were dropped" in messages[1]


def test_a_directory_that_is_made_later(
    tmp_path: Path, messages: list[str], observe: Callable[[Path], Observer]
) -> None:
    obstacle = tmp_path / "observe"
    obstacle.write_text("in the way")
    observer = observe(obstacle)
    update(observer, 1)
    obstacle.unlink()
    update(observer, 2)
    observer.close()
    assert [record["kind"] for record in read(obstacle)][:2] == ["run", "gap"]
    assert updates(obstacle) == [2]


def test_a_directory_that_is_removed(
    tmp_path: Path, messages: list[str], observe: Callable[[Path], Observer]
) -> None:
    """What is recorded afterwards stands in a new file, which says which run it is of."""
    directory = tmp_path / "observe"
    observer = observe(directory)
    update(observer, 1)
    before = read(directory)[0]
    shutil.rmtree(directory)
    update(observer, 2)
    update(observer, 3)
    observer.close()
    assert len(messages) == 2
    assert "No such file" in messages[0]
    found = read(directory)
    assert [record["kind"] for record in found[:2]] == ["run", "gap"]
    assert (found[0]["run"], found[0]["segment"]) == (before["run"], before["segment"])
    assert found[1]["records"] == 5
    assert updates(directory) == [3]
    assert (directory / "index.html").exists()
    assert Page(directory / "observe.jsonl").is_complete()


def test_a_parent_that_is_removed_is_not_made_again(
    tmp_path: Path, messages: list[str], observe: Callable[[Path], Observer]
) -> None:
    """It may be where a disk was mounted."""
    directory = tmp_path / "disk" / "observe"
    observer = observe(directory)
    update(observer, 1)
    shutil.rmtree(tmp_path / "disk")
    update(observer, 2)
    update(observer, 3)
    observer.close()
    assert not (tmp_path / "disk").exists()
    assert "10 records were dropped" in messages[-1]


def test_a_page_that_cannot_be_written_leaves_the_records(
    tmp_path: Path, messages: list[str], observe: Callable[[Path], Observer]
) -> None:
    (tmp_path / "observe-data").write_text("in the way")
    observer = observe(tmp_path)
    update(observer, 1)
    update(observer, 2)
    assert len(messages) == 1
    assert "cannot be brought up to date" in messages[0]
    assert updates(tmp_path) == [1, 2]
    (tmp_path / "observe-data").unlink()
    update(observer, 3)
    observer.close()
    assert len(messages) == 1
    assert Page(tmp_path / "observe.jsonl").is_complete()


def test_a_decoder_that_fails_costs_the_records_only(tmp_path: Path, messages: list[str]) -> None:
    def broken(ids: object) -> list[str]:
        raise KeyError("token 7")

    observer = Observer(tmp_path, FACTS, decode=broken, message=messages.append)
    observer.run(settings={})
    update(observer, 1)
    observer.close()
    assert "KeyError: 'token 7'" in messages[0]
    assert "5 records were dropped" in messages[1]


def test_a_kill_in_the_middle_of_a_write(tmp_path: Path, messages: list[str]) -> None:
    """The records of the torn update stay in the file as far as they are whole; the page leaves them out."""
    script = f"""
import os, signal
from pathlib import Path
from retrograd.observe.journal import Journal
from tests.observe.examples import *
def torn(journal, lines):
    if b'"kind":"update","time"' in lines and b'"update":2' in lines:
        os.write(journal._descriptor, lines[: len(lines) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    append(journal, lines)
append, Journal.append = Journal.append, torn
record_sums(Path({str(tmp_path)!r}), 3, groups=2)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "observe.jsonl").read_bytes().endswith(b"\n")
    observer = Observer(tmp_path, FACTS, decode=decode, message=messages.append)
    observer.run(settings={}, resumed=True)
    update(observer, 2)
    observer.close()
    assert len(messages) == 1
    assert "ended in a torn record" in messages[0]
    assert updates(tmp_path) == [1, 2]
    runs = [record for record in read(tmp_path) if record["kind"] == "run"]
    assert [run["segment"] for run in runs] == [1, 2]
    assert runs[0]["run"] == runs[1]["run"]
    assert runs[1]["torn_bytes"] > 0
    assert Page(tmp_path / "observe.jsonl").is_complete()
