"""Recording a run: what is written, when, and into which file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrograd.config import ObserveConfig
from retrograd.observe import NullObserver, Observer, RunFacts, observer_of, writer
from retrograd.observe.journal import Journal
from retrograd.progress import SilentReporter

from .examples import FACTS, decode, group, read, rollout, until


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def observe(tmp_path: Path, messages: list[str]) -> Callable[..., Observer]:
    def make(directory: Path = tmp_path / "observe", facts: RunFacts = FACTS, **options: Any) -> Observer:
        return Observer(directory, facts, decode=decode, message=messages.append, **options)

    return make


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Nothing reaches the disk before this event."""
    go = Event()
    append = Journal.append

    def wait(journal: Journal, lines: bytes) -> None:
        go.wait()
        append(journal, lines)

    monkeypatch.setattr(Journal, "append", wait)
    yield go
    go.set()


def one_group(name: str = "g") -> list[Any]:
    return [group(name, [rollout("a", ["yes"], total=1.0, advantage=0.5), rollout("b", ["no"], total=0.0)])]


def kinds(directory: Path) -> list[str]:
    return [record["kind"] for record in read(directory)]


def test_a_run_and_its_updates(observe: Callable[..., Observer], tmp_path: Path, messages: list[str]) -> None:
    observer = observe()
    observer.run(settings={"training.lr": 1e-4, "output.path": Path("/x"), "agent.tools": ("a", "b")})
    observer.update(1, one_group(), {"reward/mean": 0.5})
    observer.evaluation(1, {"eval/reward_mean": 0.25})
    observer.close()
    found = read(tmp_path / "observe")
    group_kinds = ["prompt", "rollout", "outcome", "rollout", "outcome", "selection"]
    assert [record["kind"] for record in found] == ["run", *group_kinds, "update", "evaluation"]
    run, update, evaluation = found[0], found[-2], found[-1]
    assert run["algorithm"] == "agent_grpo"
    assert run["model"] == FACTS.model
    assert run["settings"] == {"training.lr": 1e-4, "output.path": "/x", "agent.tools": ["a", "b"]}
    assert run["resumed"] is False
    assert len(run["run"]) == 8
    assert (update["update"], update["metrics"], update["rollouts"]) == (1, {"reward/mean": 0.5}, True)
    assert (evaluation["update"], evaluation["metrics"]) == (1, {"eval/reward_mean": 0.25})
    for record in found:
        assert record["v"] == 1
        assert record["segment"] == 1
        assert abs(record["time"] - found[0]["time"]) < 60
    assert messages == []


def test_held_out_answers_are_groups_too(observe: Callable[..., Observer], tmp_path: Path) -> None:
    observer = observe()
    observer.run(settings={})
    observer.evaluation(2, {"eval/reward_mean": 1.0}, one_group())
    observer.close()
    prompt = read(tmp_path / "observe")[1]
    assert (prompt["kind"], prompt["split"], prompt["update"]) == ("prompt", "eval", 2)


def test_every_third_update_has_its_rollouts(observe: Callable[..., Observer], tmp_path: Path) -> None:
    observer = observe(every=3)
    observer.run(settings={})
    for update in range(1, 8):
        assert observer.wants(update) == (update in (1, 4, 7))
        observer.update(update, one_group(), {"m": 1.0})
        until(lambda: not observer._jobs)
    observer.close()
    found = read(tmp_path / "observe")
    assert [r["update"] for r in found if r["kind"] == "prompt"] == [1, 4, 7]
    assert [r["update"] for r in found if r["kind"] == "update"] == [1, 2, 3, 4, 5, 6, 7]


def test_an_update_is_in_the_file_before_the_run_ends(
    observe: Callable[..., Observer], tmp_path: Path
) -> None:
    observer = observe()
    observer.run(settings={})
    observer.update(1, one_group(), {})
    until(lambda: not observer._jobs)
    assert kinds(tmp_path / "observe")[-1] == "update"
    observer.close()


def test_later_changes_of_a_group_are_not_seen(
    observe: Callable[..., Observer], tmp_path: Path, held: Event
) -> None:
    observer = observe()
    observer.run(settings={})
    [changing] = groups = one_group()
    observer.update(1, groups, {})
    changing.members[0].total = 99.0
    assert changing.members[0].advantage is not None
    changing.members[0].advantage[:] = np.nan
    changing.members.clear()
    held.set()
    observer.close()
    found = read(tmp_path / "observe")
    assert [r["total"] for r in found if r["kind"] == "outcome"] == [1.0, 0.0]
    assert next(r for r in found if r["kind"] == "rollout")["tokens"]["advantage"] == 0.5


def test_no_call_waits_for_the_disk(
    observe: Callable[..., Observer], tmp_path: Path, messages: list[str], held: Event
) -> None:
    """The disk stands still: every call returns, what waits is bounded, what is dropped is counted."""
    observer = observe()
    observer.run(settings={})
    updates = writer.MAX_PENDING_ROLLOUTS + 6
    for update in range(1, updates + 1):
        observer.update(update, one_group(), {"m": float(update)})
    assert sum(1 for job in observer._jobs if job.groups) == writer.MAX_PENDING_ROLLOUTS
    assert len(messages) == 1
    assert "the disk is slower than the run" in messages[0]
    held.set()
    observer.close()
    found = read(tmp_path / "observe")
    assert [r["update"] for r in found if r["kind"] == "update"] == list(range(1, updates + 1))
    assert [r["update"] for r in found if r["kind"] == "prompt"] == [1, 2, 3, 4]
    [gap] = [r for r in found if r["kind"] == "gap"]
    assert (gap["records"], gap["reason"]) == (6 * 6, "the disk is slower than the run")
    assert messages[1:] == ["observe: 36 records were dropped (the disk is slower than the run)"]


def test_updates_without_rollouts_are_bounded_too(
    observe: Callable[..., Observer], tmp_path: Path, held: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_PENDING", 5)
    observer = observe()
    observer.run(settings={})
    for update in range(1, 10):
        observer.update(update, (), {})
    assert len(observer._jobs) == 5
    held.set()
    observer.close()
    found = read(tmp_path / "observe")
    assert sum(r["records"] for r in found if r["kind"] == "gap") == 4


def test_the_end_of_a_run_waits_only_so_long(
    observe: Callable[..., Observer], messages: list[str], held: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.05)
    observer = observe()
    observer.run(settings={})
    observer.update(1, one_group(), {})
    observer.close()
    assert len(messages) == 1
    assert "7 records may be lost" in messages[0]
    observer.close()
    assert len(messages) == 1


def test_resumed_runs_append_a_segment(
    observe: Callable[..., Observer], tmp_path: Path, messages: list[str]
) -> None:
    for resumed in (False, True, True):
        observer = observe()
        observer.run(settings={}, resumed=resumed)
        observer.update(1, [], {})
        observer.close()
    runs = [record for record in read(tmp_path / "observe") if record["kind"] == "run"]
    assert [run["segment"] for run in runs] == [1, 2, 3]
    assert len({run["run"] for run in runs}) == 1
    assert [run["resumed"] for run in runs] == [False, True, True]
    assert [r["segment"] for r in read(tmp_path / "observe") if r["kind"] == "update"] == [1, 2, 3]
    assert messages == []


def test_another_run_in_the_same_directory_has_its_own_id(
    observe: Callable[..., Observer], tmp_path: Path
) -> None:
    for _ in range(2):
        observer = observe()
        observer.run(settings={})
        observer.close()
    runs = read(tmp_path / "observe")
    assert [run["segment"] for run in runs] == [1, 2]
    assert len({run["run"] for run in runs}) == 2


def test_two_runs_at_once_are_kept_apart(
    observe: Callable[..., Observer], tmp_path: Path, messages: list[str]
) -> None:
    root = tmp_path / "observe"
    first = observe()
    first.run(settings={})
    until(lambda: first._page is not None)
    facts = RunFacts(algorithm="grpo", model="m", output="/second.gguf")
    second = observe(facts=facts)
    second.run(settings={})
    second.update(1, [], {})
    second.close()
    [directory] = root.glob("run-*")
    assert messages == [f"observe: another run records into {root}; this one is recorded in {directory}"]
    assert kinds(directory) == ["run", "update"]
    assert directory.name == f"run-{read(directory)[0]['run']}"
    first.update(1, [], {})
    first.close()
    assert kinds(root) == ["run", "update"]
    resumed = observe(facts=facts)  # finds its own records again, though the directory is free now
    resumed.run(settings={}, resumed=True)
    resumed.close()
    assert kinds(root) == ["run", "update"]
    assert kinds(directory) == ["run", "update", "run"]
    assert read(directory)[2]["run"] == read(directory)[0]["run"]


def test_a_torn_last_line_is_cut_off(
    observe: Callable[..., Observer], tmp_path: Path, messages: list[str]
) -> None:
    observer = observe()
    observer.run(settings={})
    observer.update(1, [], {})
    observer.close()
    path = tmp_path / "observe" / "observe.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"v":1,"kind":"upd' + b"x" * 100_000)
    observer = observe()
    observer.run(settings={}, resumed=True)
    observer.close()
    assert path.read_bytes().startswith(whole)
    [run] = read(tmp_path / "observe")[2:]
    assert (run["kind"], run["segment"], run["torn_bytes"]) == ("run", 2, 100_018)
    assert messages == [f"observe: {path} ended in a torn record: 100018 bytes were cut off"]


def test_calls_out_of_order_are_mistakes(observe: Callable[..., Observer]) -> None:
    observer = observe()
    with pytest.raises(ValueError, match="between `run` and `close`"):
        observer.update(1, [], {})
    observer.run(settings={})
    with pytest.raises(ValueError, match="one start of a run"):
        observer.run(settings={})
    observer.close()
    with pytest.raises(ValueError, match="between `run` and `close`"):
        observer.update(1, [], {})


class Tokenizer:
    def decode_bytes(self, ids: Any, *, special: bool = True) -> bytes:
        return "".join(map(chr, ids)).encode()


def of_config(observe: ObserveConfig | None) -> Any:
    config: Any = SimpleNamespace(
        observe=observe,
        run=SimpleNamespace(algorithm="grpo"),
        model=SimpleNamespace(path="model.gguf"),
        output=SimpleNamespace(path=Path("/out.gguf")),
    )
    return observer_of(config, Tokenizer(), SilentReporter())  # type: ignore[arg-type]


def test_the_factory_reads_the_section(tmp_path: Path) -> None:
    observer = of_config(ObserveConfig(directory=tmp_path / "o", every=2, max_text_chars=2))
    observer.run(settings={})
    observer.update(1, one_group(), {})
    assert not observer.wants(2)
    observer.close()
    found = read(tmp_path / "o")
    assert (found[0]["algorithm"], found[0]["model"], found[0]["output"]) == (
        "grpo",
        "model.gguf",
        "/out.gguf",
    )
    assert found[2]["completion"] == "ye… [1 more characters]"


@pytest.mark.parametrize("section", [None, "off"])
def test_without_the_section_nothing_is_written(section: str | None, tmp_path: Path) -> None:
    directory = tmp_path / "o"
    observer = of_config(ObserveConfig(directory=directory, enabled=False) if section else None)
    assert isinstance(observer, NullObserver)
    observer.run(settings={})
    observer.update(1, one_group(), {})
    observer.evaluation(1, {})
    observer.close()
    assert not observer.wants(1)
    assert not directory.exists()
