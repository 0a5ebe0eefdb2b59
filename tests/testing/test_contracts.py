"""Contract suites: every built-in component keeps its contract, and each suite finds what breaks it.

The suites of kinds with tests of their own (optimizers, losses, judges, …) run beside those.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from retrograd.agent.tools import FunctionToolFactory
from retrograd.config import Document
from retrograd.metrics import JsonlMetrics, read_metrics
from retrograd.testing.backends import check_backend
from retrograd.testing.model_sources import check_model_source
from retrograd.testing.samplers import check_sampler
from retrograd.testing.schedules import check_schedule
from retrograd.testing.sinks import check_sink
from retrograd.testing.tools import check_tool_factory, check_toolset
from retrograd_hookspecs import (
    BuildContext,
    ModelError,
    NoConfig,
    SamplingParams,
    Schedule,
    StepResult,
    ToolDefinition,
    ToolsetDefinition,
)
from retrograd_plugins import model_sources, samplers, schedules, tool_factories, toolsets
from retrograd_plugins.sinks.tensorboard import TensorBoardSink
from retrograd_plugins.sinks.wandb import WandbSink
from tests.agent_tools.support import SubprocessSandbox
from tests.model_support import build_backend, plugin_modules
from tests.sinks.test_tensorboard import events


def modules(package: ModuleType) -> dict[str, Any]:
    """Registering modules of a kind by name."""
    return {module.__name__.rpartition(".")[2]: module for module in plugin_modules(package)}


def breaks(said: str, check: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match=said):
        check()


CONTEXT = BuildContext(config=None, base_dir=Path())


@pytest.mark.parametrize("name", modules(samplers))
def test_samplers(name: str) -> None:
    [component] = modules(samplers)[name].retrograd_samplers()
    check_sampler(component.build(NoConfig(), CONTEXT))


def test_broken_samplers() -> None:
    [component] = samplers_default().retrograd_samplers()
    good = component.build(NoConfig(), CONTEXT)

    class Broken:
        def __init__(self, change: Callable[[Any, Any, Any], Any]) -> None:
            self._change = change

        def sample(self, logits: Any, params: SamplingParams, rng: Any) -> tuple[int, float]:
            found: tuple[int, float] = self._change(logits, params, rng)
            return found

    def without_filters(logits: Any, params: SamplingParams, rng: Any) -> Any:
        return good.sample(logits, attrs.evolve(params, top_k=0, top_p=1.0, min_p=0.0), rng)

    def of_all(logits: Any, params: SamplingParams, rng: Any) -> Any:
        token, _ = good.sample(logits, params, rng)
        shifted = logits.astype(np.float64) - logits.max()
        return token, float(shifted[token] - np.log(np.exp(shifted).sum()))

    own = np.random.default_rng(1)

    def own_generator(logits: Any, params: SamplingParams, rng: Any) -> Any:
        return good.sample(logits, params, own)

    def greedy(logits: Any, params: SamplingParams, rng: Any) -> Any:
        token = int(np.argmax(logits))
        return token, of_all(logits, attrs.evolve(params, temperature=0.0), rng)[1]

    breaks("cannot be drawn", lambda: check_sampler(Broken(without_filters)))
    breaks("log p of token", lambda: check_sampler(Broken(of_all)))
    breaks("the same generator gives another draw", lambda: check_sampler(Broken(own_generator)))
    breaks("token 0 was drawn 0 times", lambda: check_sampler(Broken(greedy)))

    class Batch(Broken):
        def sample_batch(self, logits: Any, params: Any, rngs: Any) -> list[tuple[int, float]]:
            return [self.sample(*row) for row in zip(logits, params, [rngs[0]] * len(params), strict=True)]

    breaks("drawn from together", lambda: check_sampler(Batch(good.sample)))


def samplers_default() -> Any:
    return importlib.import_module("retrograd_plugins.samplers.default")


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("name", modules(schedules))
def test_schedules(name: str, warmup: int) -> None:
    [component] = modules(schedules)[name].retrograd_schedules()
    training = SimpleNamespace(lr=0.1, warmup_steps=warmup)

    def make(total: int | None) -> Schedule:
        context = BuildContext(
            config=SimpleNamespace(training=training, document=Document.from_values({})),
            base_dir=Path(),
            services={"total_steps": total},
        )
        built: Schedule = component.build(NoConfig(), context)
        return built

    check_schedule(make, totals=(2, 25))


def test_broken_schedules() -> None:
    def of(rate: Callable[[int], float]) -> Callable[[int | None], Any]:
        return lambda total: SimpleNamespace(lr=rate)

    asked: list[int] = []
    breaks("the rate is -", lambda: check_schedule(of(lambda step: 1.5 - step)))
    breaks("no step of 1", lambda: check_schedule(of(lambda step: 0.0)))
    breaks("the rate is nan", lambda: check_schedule(of(lambda step: math.nan)))
    breaks("asked before", lambda: check_schedule(of(lambda step: asked.append(step) or 1.0 / len(asked))))


def of_events(directory: Path) -> Mapping[int, Mapping[str, float]]:
    """What TensorBoard shows: a start of a session hides what earlier files have from its step on."""
    seen: dict[int, dict[str, float]] = {}
    for event in events(directory):
        if event.HasField("session_log"):
            seen = {step: values for step, values in seen.items() if step < event.step}
        for value in event.summary.value:
            seen.setdefault(event.step, {})[value.tag] = value.simple_value
    return seen


def of_lines(path: Path) -> Mapping[int, Mapping[str, float]]:
    seen: dict[int, dict[str, float]] = {}
    for record in read_metrics(path):
        lost = {name: float(text) for name, text in record.pop("nonfinite", {}).items()}
        seen.setdefault(record.pop("step"), {}).update({**record, **lost})
    return seen


def test_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of W&B by its history: the export is its own test."""
    # Event files are named after the second in which they begin, and read in the order of their names.
    clock = itertools.count(10**9)
    monkeypatch.setattr("time.time", lambda: next(clock))
    check_sink(lambda: TensorBoardSink(tmp_path / "board"), lambda: of_events(tmp_path / "board"))
    lines = tmp_path / "metrics.jsonl"
    check_sink(lambda: JsonlMetrics(lines), lambda: of_lines(lines))
    monkeypatch.setattr(WandbSink, "_export", lambda self: None)
    history = tmp_path / "wandb" / "history.jsonl"
    check_sink(lambda: WandbSink(tmp_path / "wandb", "run"), lambda: of_lines(history))


class Memory:
    """A sink that keeps steps in memory; `broken` names what it gets wrong."""

    def __init__(self, seen: dict[int, dict[str, float]], broken: str) -> None:
        self.seen, self.broken, self.open = seen, broken, True

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        kept = {n: v for n, v in metrics.items() if self.broken != "finite" or math.isfinite(v)}
        if self.broken == "parts":
            self.seen[step] = kept
        else:
            self.seen.setdefault(step, {}).update(kept)

    def close(self) -> None:
        assert self.open or self.broken != "twice", "closed twice"
        self.open = False

    def resume(self, step: int) -> None:
        for later in [n for n in self.seen if n > step and self.broken != "resume"]:
            del self.seen[later]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("parts", "step 1: train/loss is nan"),
        ("finite", "not finite was lost"),
        ("resume", "there are the steps"),
        ("twice", "closed twice"),
    ],
)
def test_broken_sinks(broken: str, said: str) -> None:
    seen: dict[int, dict[str, float]] = {}
    breaks(said, lambda: check_sink(lambda: Memory(seen, broken), lambda: seen))
    kept: dict[int, dict[str, float]] = {}
    check_sink(lambda: Memory(kept, ""), lambda: kept)


def test_model_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the network have servers in their own tests."""
    (tmp_path / "a_model").mkdir()
    (tmp_path / "a_model" / "__init__.py").write_text("")
    (tmp_path / "a_model" / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    [component] = modules(model_sources)["package"].retrograd_model_sources()
    source = component.build(NoConfig(), CONTEXT)
    absent = ["package:a_model/n.gguf", "package:no_such_package/m.gguf", "package:a_model", "package:"]
    check_model_source(source, "package:a_model/m.gguf", absent=absent, scheme="package")

    class Broken:
        def resolve(self, locator: str) -> Path:
            if locator == "package:silent":
                raise ModelError("there is nothing")
            return source.resolve("package:a_model/m.gguf")  # type: ignore[no-any-return]

    for wrong, said in (
        ("package:silent", "does not show the locator"),
        ("package:b", "names nothing and gave"),
    ):
        breaks(
            said,
            lambda wrong=wrong: check_model_source(
                Broken(), "package:a_model/m.gguf", absent=[wrong], scheme="package"
            ),
        )


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_backends(name: str) -> None:
    check_backend(build_backend(name), name)


def test_broken_backends() -> None:
    good = build_backend("reference")

    class Broken:
        def __init__(self, **changes: Any) -> None:
            self.__dict__.update(changes)

        def __getattr__(self, name: str) -> Any:
            return getattr(good, name)

    scratch = np.zeros(10**4)
    for changes, said in (
        ({"device": attrs.evolve(good.device, backend="other")}, "device.backend is 'other'"),
        ({"compute_dtype": np.dtype(np.int32)}, "no floating-point type"),
        ({"from_host": lambda array: np.asarray(array, np.float32)}, "came back as float32"),
        ({"from_host": lambda array: np.asarray(array).reshape(-1)}, "came back as"),
        (
            {"empty": lambda shape, dtype: scratch.view(dtype)[: math.prod(shape)].reshape(shape)},
            "share their memory",
        ),
        ({"upload": lambda matrix: attrs.evolve(matrix, columns=34)}, "is now"),
    ):
        breaks(said, lambda changes=changes: check_backend(Broken(**changes)))


@pytest.mark.parametrize("name", modules(toolsets))
def test_toolsets(name: str) -> None:
    [component] = modules(toolsets)[name].retrograd_toolsets()
    check_toolset(component.build(NoConfig(), CONTEXT), name)


def test_broken_toolsets() -> None:
    tool = ToolDefinition(id="t", version="1", builtin={"factory": "bash"})
    for toolset, said in (
        (ToolsetDefinition(name="b", tools=("t",)), "calls itself"),
        (ToolsetDefinition(name="a"), "holds nothing"),
        (ToolsetDefinition(name="a", tools=("t", "t@1")), "refers to a tool twice"),
        (ToolsetDefinition(name="a", tools=("t",), definitions=(tool, tool)), "defines a tool twice"),
        (
            ToolsetDefinition(name="a", tools=("t",), definitions=(attrs.evolve(tool, exec={"argv": []}),)),
            "either",
        ),
    ):
        breaks(said, lambda toolset=toolset: check_toolset(toolset, "a"))


CALLS: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "bash": ({"command": "true"}, [{"command": "exit 3"}]),
    "edit_file": (
        {"path": "f.txt", "old_text": "one", "new_text": "two"},
        [{"path": "f.txt", "old_text": "x", "new_text": "y"}],
    ),
    "grep": ({"pattern": "o"}, [{"pattern": "("}]),
    "list_dir": ({"path": "."}, [{"path": "absent"}]),
    "node": ({"code": "1"}, [{"code": "throw 1"}]),
    "python": ({"code": "1"}, [{"code": "raise SystemExit(1)"}]),
    "read_file": ({"path": "f.txt"}, [{"path": "absent"}]),
    "run_tests": ({}, []),
    "submit": ({}, []),
    "write_file": ({"path": "g.txt", "content": "x"}, [{"path": "f.txt/g", "content": "x"}]),
}


@pytest.fixture
def sandbox(tmp_path: Path) -> SubprocessSandbox:
    work = tmp_path / "work"
    work.mkdir()
    (work / "f.txt").write_text("one\n")
    (work / "test_f.py").write_text("def test_f(): pass\n")
    return SubprocessSandbox(work, str(tmp_path / "scratch"), timeout_secs=300)


def check_factory(factory: Any, definition: ToolDefinition, sandbox: Any, right: Any, wrong: Any) -> None:
    async def check() -> None:
        await check_tool_factory(factory, definition, sandbox, right=right, wrong=wrong)

    anyio.run(check)


@pytest.mark.parametrize("name", modules(tool_factories))
def test_tool_factories(name: str, sandbox: SubprocessSandbox) -> None:
    [component] = modules(tool_factories)[name].retrograd_tool_factories()
    found = [
        definition
        for module in modules(toolsets).values()
        for definition in module.TOOLSET.definitions
        if (definition.builtin or {}).get("factory") == name
    ]
    check_factory(component.build(NoConfig(), CONTEXT), found[0], sandbox, *CALLS[name])


def test_broken_tool_factories(sandbox: SubprocessSandbox) -> None:
    bash: FunctionToolFactory[Any] = modules(tool_factories)["bash"].FACTORY
    definition = ToolDefinition(id="bash", version="1", builtin={"factory": "bash"})

    async def silent(sandbox: Any, arguments: Any, params: Any) -> StepResult:
        return StepResult(observation="")

    class Loose:
        def make(self, definition: ToolDefinition) -> Any:
            return bash.make(attrs.evolve(definition, builtin={"factory": "bash"}))

    class Stubborn:
        def make(self, definition: ToolDefinition) -> Any:
            return bash.make(attrs.evolve(definition, name="bash"))

    right, wrong = CALLS["bash"]
    for factory, said in (
        (Loose(), "a parameter that there is not is taken"),
        (Stubborn(), "the definition's name does not count"),
        (attrs.evolve(bash, function=silent), "is_error is False"),
        (attrs.evolve(bash, required=("command", "when")), "not among the properties"),
    ):
        breaks(said, lambda factory=factory: check_factory(factory, definition, sandbox, right, wrong))
