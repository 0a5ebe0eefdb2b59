"""A folder with prompts, a reward and run files of algorithms that learn from rewards."""

from __future__ import annotations

import textwrap
import zlib
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd.assembly import Assembly, assemble
from retrograd.cli.document import open_document
from retrograd.progress import Reporter, SilentReporter
from retrograd.run import Run
from retrograd.session import make_run
from retrograd_hookspecs import RolloutGroup, StepReport, hookimpl
from tests.e2e.support import Outcome, Workspace, _merged, retrograd, write_jsonl

SMALL: dict[str, Any] = {
    "block_count": 1,
    "embedding_length": 32,
    "feed_forward_length": 32,
    "metadata": {"tokenizer.ggml.eos_token_id": 162},
}
"""A `TinyModel` that evaluates in a moment, and whose answers now and then end before they are cut: its end
of text is a token that it likes to write."""
REWARD = """
import zlib

def score(prompt, completion):
    return zlib.crc32((prompt + completion).encode()) % 11 / 10
"""
"""A reward that looks at every byte, so that answers to a prompt differ."""


def value_of(text: str) -> float:
    """A verdict that looks at every byte."""
    return zlib.crc32(text.encode()) % 11 / 10


class Rollouts(Workspace):
    """`Workspace` with `prompts.jsonl`, `heldout.jsonl` and `reward.py`."""

    def __init__(self, directory: Path, model: Path, device: str = "reference") -> None:
        super().__init__(directory, model, device)
        self.prompts("prompts.jsonl", [f"say {n}" + " please" * (n % 3) for n in range(5)])
        self.prompts("heldout.jsonl", [f"tell {n}" for n in range(3)])
        self.python("reward.py", REWARD)

    def prompts(self, name: str, texts: list[str], **fields: Any) -> Path:
        """Write a file of prompts, a user message each."""
        messages = [[{"role": "user", "content": text}] for text in texts]
        return write_jsonl(self / name, [{"messages": m, **fields} for m in messages])

    def python(self, name: str, source: str) -> Path:
        """Write a Python file."""
        path = self / name
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return path

    def grpo(self, name: str = "run.toml", **tables: Any) -> Path:
        """A small GRPO run with `tables` laid over it."""
        base: dict[str, Any] = {
            "run": {"algorithm": "grpo"},
            "sft": None,
            "training": {"ctx": 64, "micro_batch": 32, "lr": 1e-2},
            "grpo": {
                "prompts": "prompts.jsonl",
                "reward": "python:./reward.py:score",
                "updates": 2,
                "prompts_per_update": 2,
                "group_size": 3,
                "grpo_epochs": 1,
                "clip_range_low": 0.2,
                "clip_range_high": 0.28,
                "kl_coefficient": 0.0,
                "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 6, "seed": 0},
            },
        }
        return self.toml(name, **_merged(base, tables))

    def ppo(self, name: str = "run.toml", **tables: Any) -> Path:
        """A small PPO run with `tables` laid over it."""
        base: dict[str, Any] = {
            "run": {"algorithm": "ppo"},
            "sft": None,
            "training": {"ctx": 64, "micro_batch": 32, "lr": 1e-2},
            "ppo": {
                "prompts": "prompts.jsonl",
                "reward": "python:./reward.py:score",
                "updates": 2,
                "rollout_batch_size": 4,
                "ppo_epochs": 1,
                "clip_range": 0.2,
                "kl_coefficient": 0.05,
                "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 6, "seed": 0},
            },
        }
        return self.toml(name, **_merged(base, tables))

    def updates(self, name: str = "out/adapter.metrics.jsonl") -> list[dict[str, Any]]:
        """Records of updates and their passes, without those of evaluations."""
        return [record for record in self.metrics(name) if "train/update" in record]

    def train(self, path: Path, *arguments: object, code: int | None = 0) -> Outcome:
        """`retrograd train`."""
        return self.command("train", path, *arguments, code=code)

    def command(self, name: str, path: Path, *arguments: object, code: int | None = 0) -> Outcome:
        """Another command."""
        return retrograd(name, path, *arguments, code=code)


@attrs.define(eq=False)
class Watch:
    """Sees a run as a hook does: its parameters before and after every step, and all of its rollouts."""

    assembly: Assembly
    run: Run
    masters: list[dict[str, npt.NDArray[np.float32]]] = attrs.field(factory=list)
    groups: list[list[RolloutGroup]] = attrs.field(factory=list)
    reports: list[StepReport] = attrs.field(factory=list)

    @hookimpl
    def retrograd_run_started(self, run: Run) -> None:
        self._note(run)

    @hookimpl
    def retrograd_rollouts_ready(self, run: Run, groups: list[RolloutGroup]) -> None:
        self.groups.append(list(groups))

    @hookimpl
    def retrograd_step_finished(self, run: Run, report: StepReport) -> None:
        self.reports.append(report)
        self._note(run)

    def _note(self, run: Run) -> None:
        self.masters.append({p.name: p.value.copy() for p in run.trainable.parameters})


def watched(path: Path, reporter: Reporter | None = None) -> Watch:
    """Run a file to its end in this process."""
    assembly = assemble(open_document(path, model=None, device=None, overrides=()))
    watch = Watch(assembly, None)  # type: ignore[arg-type]
    assembly.session.register(watch, "watch")
    watch.run = make_run(assembly, reporter or SilentReporter())
    watch.run.execute()
    return watch
