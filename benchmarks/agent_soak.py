"""A soak of agentic updates: `python -m benchmarks.agent_soak --minutes 5`.

Many trajectories with real tools in worlds that are few, update after update, by a tiny model whose turns are
written beforehand. What must not grow is watched: memory, descriptors, processes, threads; and files,
containers and volumes that are left behind. Prints one JSON line; exits with 1 if anything grew after the
first updates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import psutil

from retrograd.agent.play import STREAMS_PER_TRAJECTORY
from retrograd.assembly import assemble
from retrograd.config import Document
from retrograd.progress import SilentReporter
from retrograd.session import make_run
from retrograd.testing.models import write_tiny_model
from retrograd.token_pieces import PieceEncoder
from retrograd_hookspecs import SamplingParams, StepReport, hookimpl

SETTLED = 3
"""Updates after which nothing should grow."""
SLACK_MB = 64.0
"""Growth of resident memory that is noise."""
SLACK = {"descriptors": 0, "threads": 4, "children": 0}
"""Growth that is noise: threads that wait for work come and go."""
TURNS = (
    "<tool_call>\n"
    '{"name": "bash", "arguments": {"command": "sleep 0.$((RANDOM % 5)); printf %s $$ > pid; ls"}}\n'
    "</tool_call>",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "printf 5 > answer; false"}}\n</tool_call>',
    "Done.",
)


class Written:
    """Draws the turns above; every third trajectory leaves out what earns the reward."""

    def __init__(self, tokenizer: Any) -> None:
        pieces = PieceEncoder(tokenizer)
        self._turns = [[*pieces.turn(turn, ()), tokenizer.eos_id] for turn in TURNS]

    def sample(self, logits: Any, params: SamplingParams, rng: np.random.Generator) -> tuple[int, float]:
        """The next token, and its log-probability."""
        seed: Any = rng.bit_generator.seed_seq  # type: ignore[attr-defined]
        trajectory, turn = divmod(int(seed.entropy[1]), STREAMS_PER_TRAJECTORY)
        place: int = seed.n_children_spawned
        seed.spawn(1)
        ids = self._turns[turn + 1 if trajectory % 3 == 0 and turn else turn]
        z = np.asarray(logits, np.float64)
        return ids[place], float(z[ids[place]] - z.max() - np.log(np.exp(z - z.max()).sum()))


@attrs.frozen(kw_only=True)
class Sample:
    """This process after an update; `children` counts processes below it."""

    seconds: float
    rss_mb: float
    descriptors: int
    threads: int
    children: int
    idle_fraction: float
    trajectories: int


class Watch:
    """Notes a sample after every update, and stops the run when its time is over."""

    def __init__(self, interrupt: Any, trajectories: int, seconds: float) -> None:
        self._interrupt = interrupt
        self._trajectories = trajectories
        self._process = psutil.Process()
        self._started = time.monotonic()
        self._end = self._started + seconds
        self.samples: list[Sample] = []
        self.problems: list[str] = []

    @hookimpl
    def retrograd_step_finished(self, run: Any, report: StepReport) -> None:
        """Take a sample."""
        metrics = report.metrics
        for name in ("agent/failed_fraction", "agent/truncated_fraction", "agent/unclosed_worlds"):
            if metrics.get(name):
                self.problems.append(f"update {metrics['train/update']:g}: {name} = {metrics[name]:g}")
        self.samples.append(
            Sample(
                seconds=time.monotonic() - self._started,
                rss_mb=self._process.memory_info().rss / 2**20,
                descriptors=self._process.num_fds(),
                threads=self._process.num_threads(),
                children=len(self._process.children(recursive=True)),
                idle_fraction=metrics["agent/decode_idle_fraction"],
                trajectories=self._trajectories,
            )
        )
        if time.monotonic() > self._end:
            self._interrupt.requested = True


def growth(samples: Sequence[Sample]) -> list[str]:
    """What grew after the first updates."""
    first, rest = samples[SETTLED], samples[SETTLED + 1 :]
    grown = [
        f"{name}: {getattr(first, name)} after update {SETTLED + 1}, {getattr(rest[-1], name)} at the end"
        for name, slack in SLACK.items()
        if getattr(rest[-1], name) > getattr(first, name) + slack
    ]
    if rest[-1].rss_mb > first.rss_mb + SLACK_MB:
        grown.append(f"memory: {first.rss_mb:.0f} MB, {rest[-1].rss_mb:.0f} MB at the end")
    return grown


def environment_of(given: argparse.Namespace) -> dict[str, Any]:
    """`[agent.environment]`."""
    table: dict[str, Any] = {"type": given.environment, "tools": {"default": "base"}}
    if given.environment == "local":
        return {**table, "allow_unsandboxed": True}
    pool = {"max_live": given.worlds, "min_idle": given.worlds, "reuse": given.reuse}
    image = {"profile": "custom", "image": given.image} if given.image else {}
    return {**table, **image, "pool": pool}


def in_engine() -> dict[str, int]:
    """What the container engine holds."""
    from retrograd_plugins.sandboxes._docker import Engine

    engine = Engine.connect(1)
    try:
        return {
            "containers": len(engine.api.containers(all=True)),
            "volumes": len(engine.api.volumes().get("Volumes") or []),
        }
    finally:
        engine.close()


def soak(given: argparse.Namespace, directory: Path) -> tuple[Watch, dict[str, int]]:
    """Run; what was seen, and what was left in the directory for temporary files."""
    model = write_tiny_model(
        directory / "model.gguf",
        block_count=1,
        embedding_length=32,
        feed_forward_length=32,
        context_length=4096,
    )
    verify = {"command": ["sh", "-c", "test -f answer"], "reward_on_success": 1.0}
    scenarios = "".join(
        json.dumps({"id": f"s{n}", "user": "Write the answer.", "metadata": {"env": {"verify": verify}}})
        + "\n"
        for n in range(16)
    )
    (directory / "scenarios.jsonl").write_text(scenarios)
    groups = given.trajectories // given.group_size
    values: dict[str, Any] = {
        "run": {"algorithm": "agent_grpo"},
        "model": {"path": str(model)},
        "output": {"path": str(directory / "out.gguf")},
        "lora": {"rank": 2},
        "training": {
            "ctx": 4096,
            "micro_batch": 512,
            "lr": 1e-4,
            "generation_concurrency": given.trajectories,
        },
        "agent": {
            "scenarios": str(directory / "scenarios.jsonl"),
            "updates": 1_000_000,
            "scenarios_per_update": groups,
            "group_size": given.group_size,
            "epochs_per_update": 1,
            "max_new_tokens_per_turn": 160,
            "environment": environment_of(given),
        },
    }
    assembly = assemble(Document.from_values(values))
    assembly.services.provide("sampler", Written(assembly.services.get("tokenizer")))
    algorithm: Any = assembly.services.get("algorithm")
    algorithm._stage.provider.places = given.worlds
    watch = Watch(assembly.services.get("interrupt"), groups * given.group_size, given.minutes * 60)
    assembly.session.register(watch, "watch")
    make_run(assembly, SilentReporter()).execute()
    left = {name: len(os.listdir(directory / name)) for name in ("tmp",)}
    return watch, left


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--trajectories", type=int, default=64, help="of an update (64)")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--worlds", type=int, default=8, help="alive at once (8)")
    parser.add_argument("--environment", choices=("local", "container"), default="local")
    parser.add_argument("--image", help="of containers, with bash (that of the profile `python`)")
    parser.add_argument("--reuse", choices=("never", "workspace"), default="workspace")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "tmp").mkdir()
        tempfile.tempdir = str(directory / "tmp")
        before = in_engine() if given.environment == "container" else {}
        watch, left = soak(given, directory)
        after = in_engine() if given.environment == "container" else {}
    samples = watch.samples
    problems = [*watch.problems, *(f"{count} files left in {name}" for name, count in left.items() if count)]
    problems += [
        f"{name}: {before[name]} before, {after[name]} after" for name in after if after[name] != before[name]
    ]
    if len(samples) > SETTLED + 1:
        problems += growth(samples)
    else:
        problems.append(f"only {len(samples)} updates: give it more minutes")
    wall = samples[-1].seconds if samples else 0.0
    idle = [one.idle_fraction for one in samples]
    shown = {
        "updates": len(samples),
        "trajectories": sum(one.trajectories for one in samples),
        "minutes": round(wall / 60, 2),
        "trajectories_per_second": round(sum(one.trajectories for one in samples) / max(wall, 1e-9), 2),
        "decode_idle_fraction": round(float(np.mean(idle)), 3) if idle else None,
        "settled": attrs.asdict(samples[SETTLED]) if len(samples) > SETTLED else None,
        "end": attrs.asdict(samples[-1]) if samples else None,
        "engine": {"before": before, "after": after},
        "problems": problems,
    }
    sys.stdout.write(json.dumps(shown) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
