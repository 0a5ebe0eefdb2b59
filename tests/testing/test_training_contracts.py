"""Contract suites of what trains: algorithms and trainables, built-in ones and broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from retrograd.assembly import assemble
from retrograd.config import Document
from retrograd.testing.algorithms import check_algorithm
from retrograd.testing.trainables import check_trainable
from retrograd_hookspecs import Algorithm, Trainable
from tests.algorithms.support import REWARD, SMALL

SFT = {"sft": {"data": "train.jsonl"}, "training": {"ctx": 32, "micro_batch": 32, "epochs": 4}}
GRPO: Mapping[str, Any] = {
    "grpo": {
        "prompts": "prompts.jsonl",
        "reward": "python:./reward.py:score",
        "updates": 4,
        "prompts_per_update": 1,
        "group_size": 2,
        "grpo_epochs": 1,
        "clip_range_low": 0.2,
        "clip_range_high": 0.28,
        "kl_coefficient": 0.0,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4, "seed": 0},
    },
    "training": {"ctx": 64, "micro_batch": 64},
}


@pytest.fixture
def built(tmp_path: Path, tiny_model: Callable[..., Path]) -> Callable[..., tuple[Algorithm, Trainable]]:
    """An algorithm with its trainable, on a small model and a few records."""
    records = [
        {
            "messages": [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": f"number {n}"},
            ]
        }
        for n in range(3)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prompts = [{"messages": record["messages"][:1]} for record in records]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (tmp_path / "reward.py").write_text(REWARD)

    def make(tables: Mapping[str, Any] = SFT) -> tuple[Algorithm, Trainable]:
        values: dict[str, Any] = {
            "run": {"algorithm": next(iter(tables))},
            "model": {"path": str(tiny_model(**SMALL)), "device": "reference"},
            "output": {"path": "out.gguf"},
            "lora": {"rank": 2, "targets": ["q", "v"]},
            **tables,
        }
        if "sft" in tables:
            values["evaluation"] = {"data": "train.jsonl"}
        services = assemble(Document.from_values(values, base_dir=tmp_path)).services
        services.get("engine")
        return services.get("algorithm"), services.get("trainable")

    return make


@pytest.mark.parametrize("tables", [SFT, GRPO], ids=["sft", "grpo"])
def test_algorithms(built: Callable[..., tuple[Algorithm, Trainable]], tables: Mapping[str, Any]) -> None:
    check_algorithm(lambda: built(tables), steps=3, stop=1)


class Changed:
    """Another object with some of its methods replaced."""

    def __init__(self, good: Any, **changes: Any) -> None:
        self._good = good
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._good, name)


def forgetful(good: Any) -> Any:
    return Changed(good, load=lambda state: None)


def late(good: Any) -> Any:
    """Reports the step before the one that was taken."""
    return Changed(good, run=lambda update: (attrs.evolve(r, step=r.step - 1) for r in good.run(update)))


def rehearsing(good: Any, trainable: Trainable) -> Any:
    def rehearse() -> None:
        trainable.parameters[0].value += 1.0

    return Changed(good, rehearse=rehearse)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda good, trainable: forgetful(good), "ends with other weights|is called step 1"),
        (lambda good, trainable: late(good), "is called step 0"),
        (rehearsing, r"rehearse\(\) changed what is trained"),
        (
            lambda good, trainable: Changed(good, signature=lambda: {"path": Path("x")}),
            "not JSON serializable",
        ),
        (lambda good, trainable: Changed(good, signature=lambda: {"a": (1,)}), "is not plain JSON"),
    ],
)
def test_broken_algorithms(
    built: Callable[..., tuple[Algorithm, Trainable]], broken: Callable[..., Any], said: str
) -> None:
    def make() -> tuple[Algorithm, Trainable]:
        good, trainable = built()
        return broken(good, trainable), trainable

    with pytest.raises((AssertionError, TypeError), match=said):
        check_algorithm(make, steps=3, stop=1)


def test_trainables(built: Callable[..., tuple[Algorithm, Trainable]], tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    check_trainable(lambda: built()[1], tmp_path / "results")


def unrounded(good: Any) -> Any:
    def refresh() -> None:
        good.refresh()
        for parameter in good.parameters:
            parameter.weight = parameter.value.copy()

    return Changed(good, refresh=refresh)


def noisy(good: Any) -> Any:
    def save(path: Path) -> None:
        good.save(path)
        path.with_name("notes.txt").write_text("saved")

    return Changed(good, save=save)


def half(good: Any) -> Any:
    def load(path: Path) -> None:
        kept = good.parameters[0].value.copy()
        good.load(path)
        good.parameters[0].value[...] = kept
        good.refresh()

    return Changed(good, load=load)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (unrounded, "not the master rounded to f16"),
        (noisy, "leaves further files"),
        (half, "not what was trained"),
        (lambda good: Changed(good, parameters=[*good.parameters, good.parameters[0]]), "the same name"),
        (lambda good: Changed(good, parameters=[]), "nothing is trained"),
        (lambda good: Changed(good, signature=lambda: {"id": id(good)}), "another one"),
    ],
)
def test_broken_trainables(
    built: Callable[..., tuple[Algorithm, Trainable]],
    tmp_path: Path,
    broken: Callable[[Any], Any],
    said: str,
) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(AssertionError, match=said):
        check_trainable(lambda: broken(built()[1]), tmp_path / "results")
