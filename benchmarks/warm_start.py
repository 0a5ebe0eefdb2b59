"""`python -m benchmarks.warm_start`: what each stage of a warm start is worth, with every seed.

Runs the commands of the example's README once a seed, one after the other: SFT on demonstrations, `collect`,
SFT on the traces, agentic GRPO. Each stage is measured on the held-out scenarios, one trajectory each: the
first two with `retrograd bench`, the others by the evaluations of the last run, before its first update and
after its last.
Written are `warm-start.json` with everything and the picture `warm-start.svg`.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from retrograd.metrics import read_metrics

from .machine import available_processors, describe_machine
from .warm_start_picture import draw

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "warm-start"
NAME = "warm-start"
LOG_TAIL = 2000
STAGES = ("base model", "demonstrations", "collected traces", "agentic GRPO")


class RunError(Exception):
    """A command failed."""


@attrs.frozen(kw_only=True)
class Chain:
    """All stages with one seed."""

    seed: int
    stages: Mapping[str, Mapping[str, float]]
    """Held-out metrics (`eval/*`) by stage."""
    collected: Mapping[str, Any]
    """Totals of the report of `collect`."""
    curve: Sequence[tuple[int, float]]
    """Updates made, and the held-out reward that the run itself evaluates."""
    commands: Sequence[Mapping[str, Any]]
    """Each command, its wall time and processor time (s, all cores together)."""


@attrs.define
class Commands:
    """Runs `retrograd` in the example's folder; its files are written elsewhere.

    Args:
        example: holds the TOMLs.
        directory: of what is written.
        seed: of adapters and draws.
        options: further options of every command.
    """

    example: Path
    directory: Path
    seed: int
    options: Sequence[str]
    done: list[dict[str, Any]] = attrs.field(factory=list)

    def run(self, command: str, toml: str, *arguments: object, **assignments: object) -> str:
        """Standard output of `retrograd COMMAND`. Raises: `RunError`."""
        line = [command, str(self.example / toml), *map(str, arguments), *self.options]
        for name, value in assignments.items():
            line += ["--set", f"{name.replace('__', '.')}={value}"]
        log = self.directory / "log.txt"
        before, started = _processor_seconds(), time.perf_counter()
        with log.open("ab") as output:
            ended = subprocess.run(
                [sys.executable, "-m", "retrograd", *line],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                check=False,
            )
            output.write(ended.stdout)
        seconds, processor = time.perf_counter() - started, _processor_seconds() - before
        if ended.returncode:
            tail = log.read_text(errors="replace")[-LOG_TAIL:]
            raise RunError(f"retrograd {' '.join(line)} ended with status {ended.returncode}:\n{tail}")
        self.done.append(
            {
                "command": f"{command} {toml}",
                "seconds": round(seconds, 1),
                "processor_seconds": round(processor, 1),
            }
        )
        _say(f"seed {self.seed}: {command} {toml}: {seconds:.0f} s, {processor:.0f} s of the processor")
        return ended.stdout.decode()

    def file(self, name: str) -> Path:
        """A file that is written."""
        return self.directory / name


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks.warm_start", description=__doc__)
    out.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="(0 1 2)")
    out.add_argument("--out", type=Path, default=ROOT / "build" / NAME, metavar="DIR")
    out.add_argument("--pictures", type=Path, metavar="DIR", help="write JSON and SVG here instead of --out")
    out.add_argument("--model", metavar="GGUF", help="instead of the example's own")
    out.add_argument("--add", action="store_true", help="keep the seeds that the JSON has already")
    out.add_argument("--redraw", action="store_true", help="draw the picture from the JSON, train nothing")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0, or 1 if a command failed, 130 if interrupted."""
    args = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder: Path = args.pictures or args.out
    result = folder / f"{NAME}.json"
    try:
        if not args.redraw:
            measure(args, result)
        data = json.loads(result.read_text(encoding="utf-8"))
    except (RunError, OSError, ValueError) as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    result.with_suffix(".svg").write_text(draw(data), encoding="utf-8")
    sys.stdout.write(summary(data) + f"wrote {result} and {result.with_suffix('.svg')}\n")
    return 0


def measure(args: argparse.Namespace, result: Path) -> None:
    """Run the chain once a seed and write what was measured after each. Raises: `RunError`."""
    kept = args.add and result.exists()
    runs: list[Any] = json.loads(result.read_text(encoding="utf-8"))["runs"] if kept else []
    options = ["--model", str(Path(args.model).resolve())] if args.model else []
    for seed in (seed for seed in args.seeds if seed not in [run["seed"] for run in runs]):
        directory = args.out.resolve() / f"seed-{seed}-{time.time_ns()}"
        directory.mkdir(parents=True)
        runs.append(attrs.asdict(run_chain(Commands(EXAMPLE, directory, seed, options))))
        result.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "example": NAME,
            "processors": available_processors(),
            "machine": describe_machine(),
            "runs": sorted(runs, key=lambda run: int(run["seed"])),
        }
        result.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def run_chain(commands: Commands) -> Chain:
    """All stages with one seed, each measured. Raises: `RunError`."""
    seed, file = commands.seed, commands.file
    demos, warm, agent = file("demos.gguf"), file("warm.gguf"), file("agent.gguf")
    traces, report = file("traces.jsonl"), file("pass.json")
    commands.run("train", "demos.toml", output__path=demos, lora__seed=seed)
    benched: dict[str, dict[str, float]] = json.loads(
        commands.run("bench", "agent.toml", "--adapter", demos, "--json", agent__seed=seed)
    )
    commands.run(
        "collect", "agent.toml", "--adapter", demos, "--k", 3,
        "--out", traces, "--report", report, "--seed", seed,
    )  # fmt: skip
    commands.run("train", "warm.toml", output__path=warm, sft__data=traces, lora__seed=seed)
    commands.run(
        "train", "agent.toml", lora__init_adapter=warm, output__path=agent, agent__seed=seed,
        observe__directory=file("observed"),
    )  # fmt: skip
    evaluated = evaluations(list(read_metrics(file("agent.metrics.jsonl"))))
    sides = (benched["base"], benched["adapter"], evaluated[0][1], evaluated[-1][1])
    return Chain(
        seed=seed,
        stages=dict(zip(STAGES, sides, strict=True)),
        collected=json.loads(report.read_text(encoding="utf-8"))["totals"],
        curve=[(update, metrics["eval/reward"]) for update, metrics in evaluated],
        commands=commands.done,
    )


def evaluations(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Updates made and `eval/*`, at each evaluation among records of `metrics.jsonl`."""
    found: list[tuple[int, dict[str, float]]] = []
    update = 0
    for record in records:
        update = int(record.get("train/update", update))
        if "eval/reward" in record:
            metrics = {name: value for name, value in record.items() if name.startswith("eval/")}
            found.append((update, metrics))
    return found


def summary(data: Mapping[str, Any]) -> str:
    """A Markdown table, one row a seed: the share of solved held-out scenarios at each stage."""
    rows = [
        f"| seed | {' | '.join(STAGES)} | collected | processor minutes |",
        "|---" * (len(STAGES) + 3) + "|",
    ]
    for run in data["runs"]:
        shares = " | ".join(f"{run['stages'][stage]['eval/reward']:.2f}" for stage in STAGES)
        found = run["collected"]
        minutes = sum(command["processor_seconds"] for command in run["commands"]) / 60
        rows.append(
            f"| {run['seed']} | {shares} | {found['passed']} of {found['attempts']}, {found['traces']} traces"
            f" | {minutes:.1f} |"
        )
    return "\n".join(rows) + "\n"


def _processor_seconds() -> float:
    """Of all processes that ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
