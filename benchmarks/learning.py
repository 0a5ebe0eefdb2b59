"""`python -m benchmarks.learning`: does an example of learning from rewards learn, with every seed?

Trains the example once a seed, one after the other, each in a process of its own. The curve is the held-out
reward that the run itself evaluates. Written are `NAME.json` with everything and the picture `NAME.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import psutil

from retrograd.config import load_document
from retrograd.errors import RetrogradError
from retrograd.metrics import read_metrics

from .learning_picture import draw
from .machine import available_processors, describe_machine

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.2
OUTPUT = "adapter"
LOG_TAIL = 2000


@attrs.frozen(kw_only=True)
class Point:
    """An evaluation."""

    update: int
    """Updates that had been made."""
    reward: float
    """Mean reward of the held-out prompts."""
    metrics: Mapping[str, float]
    """All `eval/*` metrics."""
    seconds: float
    """Since the evaluation before training: wall time, evaluations included."""
    processor_seconds: float
    """The same as processor time of the run with its reward program, all cores together."""


@attrs.frozen(kw_only=True)
class Curve:
    """A run with one seed. Processor time over `processors` is what the wall time cannot be below."""

    seed: int
    points: Sequence[Point]
    wall_seconds: float
    """Of the whole process: loading, kernels, evaluations."""
    processor_seconds: float
    tokens: int
    """Generated in updates."""
    answers: int
    """Generated in updates."""
    samples: Sequence[Mapping[str, Any]]
    """Some held-out prompts with their answers before and after training."""


class RunError(Exception):
    """A training run failed."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    out.add_argument(
        "--example", type=Path, required=True, metavar="DIR", help="holds one TOML of grpo or ppo"
    )
    out.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="(0 1 2)")
    out.add_argument("--out", type=Path, default=ROOT / "build" / "learning", metavar="DIR")
    out.add_argument("--pictures", type=Path, metavar="DIR", help="write JSON and SVG here instead of --out")
    out.add_argument("--model", metavar="GGUF", help="instead of the example's own")
    out.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as of `retrograd train`"
    )
    out.add_argument("--redraw", action="store_true", help="draw the picture from the JSON, train nothing")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0, or 1 if a run failed, 2 for a wrong request, 130 if interrupted."""
    args = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(args)
    except (OSError, ValueError, RetrogradError) as error:
        _say(f"error: {error}")
        return 2
    except RunError as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def _run(args: argparse.Namespace) -> int:
    toml = example_file(args.example)
    folder = args.pictures or args.out
    result = folder / f"{toml.stem}.json"
    if args.redraw:
        data = json.loads(result.read_text(encoding="utf-8"))
    else:
        curves = []
        for seed in args.seeds:
            directory = args.out.resolve() / toml.stem / f"seed-{seed}"
            options = [*args.set, *(["model.path=" + str(Path(args.model).resolve())] if args.model else [])]
            curves.append(train(toml, seed, directory, options, _say))
            folder.mkdir(parents=True, exist_ok=True)
            data = to_json(toml, curves, args.set)
            # After every seed, so that what was measured survives an interruption.
            result.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    picture = result.with_suffix(".svg")
    picture.write_text(draw(data), encoding="utf-8")
    sys.stdout.write(summary(data) + f"wrote {result} and {picture}\n")
    return 0


def example_file(directory: Path) -> Path:
    """The TOML of an example. Raises `ValueError` unless there is one, of grpo or ppo, that evaluates."""
    found = sorted(directory.glob("*.toml"))
    if len(found) != 1:
        raise ValueError(f"{directory} has {len(found)} TOML files, and an example has one")
    document = load_document(found[0])
    algorithm = document.get("run.algorithm")
    if algorithm not in ("grpo", "ppo"):
        raise ValueError(
            f"{found[0]}: run.algorithm is {algorithm!r}; only grpo and ppo have seeds of sampling"
        )
    if not document.table("evaluation").given:
        raise ValueError(f"{found[0]} has no [evaluation], and so no held-out reward")
    return found[0]


def train(
    toml: Path, seed: int, directory: Path, options: Sequence[str], report: Callable[[str], None]
) -> Curve:
    """Train with `seed` for the adapter and for the draws; everything is written under `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    metrics = directory / f"{OUTPUT}.metrics.jsonl"
    algorithm = load_document(toml).get("run.algorithm")
    assignments = [
        f"output.path={directory / OUTPUT}.gguf",
        f"observe.directory={directory / f'observed-{time.time_ns()}'}",
        f"lora.seed={seed}",
        f"{algorithm}.sampling.seed={seed}",
        *options,
    ]
    command = [sys.executable, "-m", "retrograd", "train", str(toml)]
    command += [part for assignment in assignments for part in ("--set", assignment)]
    log = directory / "log.txt"
    report(f"{toml.stem}, seed {seed}: training; its output goes to {log}")
    metrics.unlink(missing_ok=True)
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        with _ended(process):
            times = _watch(process, metrics, lambda point: report(f"{toml.stem}, seed {seed}: {point}"))
    wall = time.perf_counter() - started
    if process.returncode:
        tail = log.read_text(errors="replace")[-LOG_TAIL:]
        raise RunError(f"{toml} with seed {seed} ended with status {process.returncode}:\n{tail}")
    records = list(read_metrics(metrics))
    observed = Path(assignments[1].partition("=")[2]) / "observe.jsonl"
    return Curve(
        seed=seed,
        points=points(records, times),
        wall_seconds=round(wall, 1),
        processor_seconds=round(max(times.values(), default=0.0), 1),
        tokens=int(sum(record.get("generation/tokens", 0.0) for record in records)),
        answers=answers(records),
        samples=samples(observed.read_text(encoding="utf-8").splitlines()) if observed.is_file() else (),
    )


def points(records: Sequence[Mapping[str, Any]], times: Mapping[int, float]) -> list[Point]:
    """The evaluations among records of `metrics.jsonl`. `times`: processor seconds at the n-th evaluation."""
    found: list[Point] = []
    update, start, start_processor = 0, 0.0, 0.0
    for record in records:
        update = int(record.get("train/update", update))
        if "eval/reward" not in record:
            continue
        processor = times.get(len(found), 0.0)
        if not found:
            start, start_processor = record["time"], processor
        found.append(
            Point(
                update=update,
                reward=record["eval/reward"],
                metrics={name: value for name, value in record.items() if name.startswith("eval/")},
                seconds=round(record["time"] - start, 1),
                processor_seconds=round(processor - start_processor, 1),
            )
        )
    return found


def answers(records: Sequence[Mapping[str, Any]]) -> int:
    """Answers drawn in updates. A record of an update's first pass has their mean length and their tokens."""
    return sum(
        round(record["generation/tokens"] / record["completions/length_mean"])
        for record in records
        if record.get("completions/length_mean")
    )


def samples(lines: Sequence[str], count: int = 4) -> list[dict[str, Any]]:
    """The first held-out prompts of `observe.jsonl`, with their first and last answers and rewards."""
    prompts: dict[str, str] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        record = json.loads(line)
        if record["kind"] == "prompt" and record["split"] == "eval":
            prompts[record["group"]] = record["messages"][-1]["content"]
        elif record.get("group") in prompts and record["kind"] == "rollout":
            found.setdefault(record["group"], []).append({"answer": record["completion"]})
        elif record.get("group") in prompts and record["kind"] == "outcome":
            found[record["group"]][-1]["reward"] = record["reward"].get("value")
    return [
        {"prompt": prompts[group], "before": found[group][0], "after": found[group][-1]}
        for group in list(prompts)[:count]
        if group in found
    ]


def to_json(toml: Path, curves: Sequence[Curve], options: Sequence[str]) -> dict[str, Any]:
    """What is written: the runs, what they ran on, and settings that differ from the example's."""
    document = load_document(toml)
    algorithm = document.get("run.algorithm")
    return {
        "example": toml.stem,
        "algorithm": algorithm,
        "updates": document.get(f"{algorithm}.updates"),
        "set": list(options),
        "processors": available_processors(),
        "machine": describe_machine(),
        "runs": [attrs.asdict(curve) for curve in curves],
    }


def summary(data: Mapping[str, Any]) -> str:
    """A Markdown table, one row a seed."""
    rows = [
        "| seed | held-out before | after | best | updates | answers | minutes here | processor minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in data["runs"]:
        rewards = [point["reward"] for point in run["points"]]
        rows.append(
            f"| {run['seed']} | {rewards[0]:.2f} | {rewards[-1]:.2f} | {max(rewards):.2f}"
            f" | {run['points'][-1]['update']} | {run['answers']} | {run['wall_seconds'] / 60:.1f}"
            f" | {run['processor_seconds'] / 60:.1f} |"
        )
    return "\n".join(rows) + "\n"


def _watch(
    process: subprocess.Popen[bytes], metrics: Path, report: Callable[[str], None]
) -> dict[int, float]:
    """Wait for the end; processor seconds by evaluation, and under -1 those of the whole run."""
    times: dict[int, float] = {}
    seen = 0
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        used = _processor_seconds(process.pid)
        if used is not None:
            times[-1] = used
        if not metrics.is_file():
            continue
        evaluations = [r for r in _complete(metrics) if "eval/reward" in r]
        for record in evaluations[seen:]:
            times[seen] = times.get(-1, 0.0)
            report(f"step {record['step']}: held-out reward {record['eval/reward']:.3f}")
            seen += 1
    return times


def _complete(metrics: Path) -> Iterator[dict[str, Any]]:
    """The records written so far; the last line may be torn."""
    with metrics.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.endswith("\n"))


def _processor_seconds(pid: int) -> float | None:
    """Of a process and its children; None if it is gone."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return None
    for member in family:
        with suppress(psutil.Error):
            used = member.cpu_times()
            total += used.user + used.system
    return total


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Nothing stays behind, whatever happens."""
    try:
        yield
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
