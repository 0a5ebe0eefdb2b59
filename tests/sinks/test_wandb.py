"""The W&B export, against a stand-in for the package: what is logged, when, and what a resume does.

The real package writes a binary log that only W&B reads; `wandb sync --view` of it was checked by hand.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from retrograd_hookspecs import BuildContext, ConfigError, NoConfig
from retrograd_plugins.sinks.wandb import WandbSink, retrograd_sinks


class FakeRun:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.dir = str(directory)
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        assert not self.finished
        assert not self.logged or step > self.logged[-1][0], "W&B ignores steps that do not rise"
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Runs that the stand-in was asked for."""
    made: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        assert options["mode"] == "offline"
        run = FakeRun(Path(options["dir"]) / "wandb" / f"offline-run-{len(made)}" / "files")
        made.append(run)
        return run

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.Settings = lambda **settings: settings  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "wandb", module)
    return made


def test_run_is_exported_once_when_it_ends(tmp_path: Path, runs: list[FakeRun]) -> None:
    sink = WandbSink(tmp_path, "out")
    sink.write(1, {"a": 1.0})
    sink.write(1, {"eval/loss": math.nan})
    sink.write(2, {"a": 2.0})
    assert runs == []
    sink.close()
    sink.close()
    (run,) = runs
    assert run.finished
    (first, second) = run.logged
    assert first[0] == 1
    assert first[1]["a"] == 1.0
    assert math.isnan(first[1]["eval/loss"])
    assert second == (2, {"a": 2.0})


def test_resumed_run_is_exported_whole_and_replaces_the_earlier_export(
    tmp_path: Path, runs: list[FakeRun]
) -> None:
    first = WandbSink(tmp_path, "out")
    for step in (1, 2, 3):
        first.write(step, {"a": 1.0})
    first.close()
    second = WandbSink(tmp_path, "out")
    second.resume(2)
    second.write(3, {"a": 9.0})
    second.close()
    assert runs[1].logged == [(1, {"a": 1.0}), (2, {"a": 1.0}), (3, {"a": 9.0})]
    assert [path.name for path in (tmp_path / "wandb").iterdir()] == ["offline-run-1"]


def test_run_without_metrics_exports_nothing(tmp_path: Path, runs: list[FakeRun]) -> None:
    WandbSink(tmp_path, "out").close()
    assert runs == []
    assert list(tmp_path.iterdir()) == []


def test_component(tmp_path: Path, runs: list[FakeRun]) -> None:
    (component,) = retrograd_sinks()
    assert (component.extra, component.requires) == ("wandb", ("wandb",))

    def context(directory: Path | None) -> BuildContext:
        config = SimpleNamespace(
            metrics=SimpleNamespace(wandb_export_dir=directory),
            output=SimpleNamespace(path=Path("x/out.gguf")),
        )
        return BuildContext(config=config, base_dir=tmp_path)

    assert isinstance(component.build(NoConfig(), context(tmp_path)), WandbSink)
    with pytest.raises(ConfigError, match=r"metrics\.wandb_export_dir"):
        component.build(NoConfig(), context(None))
