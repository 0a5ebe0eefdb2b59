"""GRPO updates of retrograd: one prompt, several answers of fixed length; prints one JSON line.

The same work as `trl_grpo`: the same prompts, reward, adapter and number of tokens; answers are forced to
their full length. All else is retrograd's defaults.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.measure import PeakMemory, emit
from benchmarks.retrograd_parts import VERSIONS
from retrograd.assembly import assemble
from retrograd.config import Document
from retrograd.progress import SilentReporter
from retrograd.session import make_run
from retrograd_hookspecs import SamplingParams, StepReport, hookimpl

PROMPTS = [f"What is {a} + {a + 7}? Think step by step, then give the answer." for a in range(12, 76)]
REWARD = "def distinct_words(prompt, completion):\n    return len(set(completion.split())) / 64\n"
MICRO_BATCH = 1280
"""Tokens of a pass: the group and its prompt in one, as the peer trains it."""


class NeverStops:
    """The run's sampler, which never draws a token that ends an answer."""

    def __init__(self, sampler: Any, stop_ids: frozenset[int]) -> None:
        self._sampler = sampler
        self._stop_ids = sorted(stop_ids)

    def sample(self, logits: Any, params: SamplingParams, rng: np.random.Generator) -> tuple[int, float]:
        logits[self._stop_ids] = -np.inf
        drawn: tuple[int, float] = self._sampler.sample(logits, params, rng)
        return drawn

    def sample_batch(self, logits: Any, params: Sequence[Any], rngs: Sequence[Any]) -> Any:
        logits[:, self._stop_ids] = -np.inf
        return self._sampler.sample_batch(logits, params, rngs)


class Clock:
    """Seconds of every update, from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.phases: list[dict[str, float]] = []
        self._last = 0.0

    @hookimpl
    def retrograd_run_started(self, run: Any) -> None:
        self._last = time.perf_counter()

    @hookimpl
    def retrograd_step_finished(self, run: Any, report: StepReport) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self.phases.append({k: v for k, v in report.metrics.items() if k.startswith("timing/")})
        self._last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("answers", "tokens", "rank", "threads", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--kernels", default="auto")
    a = parser.parse_args()

    memory = PeakMemory()
    clock = Clock()
    with TemporaryDirectory(prefix="retrograd-benchmark-") as name:
        directory = Path(name)
        (directory / "reward.py").write_text(REWARD)
        records = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
        (directory / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        assembly = assemble(Document.from_values(_values(a), base_dir=directory))
        services = assembly.services
        services.provide("sampler", NeverStops(services.get("sampler"), services.get("tokenizer").stop_ids))
        assembly.session.register(clock, "clock")
        run = make_run(assembly, SilentReporter())
        memory.reset()
        run.execute()
    emit(
        seconds=clock.seconds[a.warmup :],
        work=a.answers * a.tokens,
        memory=memory,
        versions=VERSIONS,
        phases=clock.phases[a.warmup :],
    )


def _values(a: argparse.Namespace) -> dict[str, Any]:
    return {
        "run": {"algorithm": "grpo"},
        "model": {"path": a.model, "device": "cpu"},
        "lora": {"rank": a.rank, "alpha": 2.0 * a.rank},
        "training": {"ctx": MICRO_BATCH, "micro_batch": MICRO_BATCH, "threads": a.threads},
        "output": {"path": "adapter.gguf"},
        "plugin": {"cpu": {"kernels": a.kernels}},
        "grpo": {
            "prompts": "prompts.jsonl",
            "reward": "python:./reward.py:distinct_words",
            "updates": a.warmup + a.steps,
            "prompts_per_update": 1,
            "group_size": a.answers,
            "grpo_epochs": 1,
            "clip_range_low": 0.2,
            "clip_range_high": 0.2,
            "kl_coefficient": 0.0,
            "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": a.tokens, "seed": 0},
        },
    }


if __name__ == "__main__":
    main()
