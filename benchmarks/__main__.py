"""`python -m benchmarks`: retrograd against its peers and the machine's limits, in one run."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from retrograd.cache import cache_dir
from retrograd.errors import RetrogradError

from . import cases as case_module
from . import contestants as contestant_module
from . import context_picture
from .contestants import Contestant, Options
from .machine import available_processors, describe_machine
from .models import model_work, resolve
from .runner import ROOT, Runs, measure
from .tables import Report, to_json, to_markdown

QUICK = {"rounds": 1, "steps": 2, "max_tokens": 32}
FULL = {"rounds": 3, "steps": 3, "max_tokens": 0}
INTERRUPTED = 130


class UsageError(Exception):
    """The command line asks for something that is not there."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    out.add_argument(
        "--rounds", type=_positive, help="rounds; each runs every contestant once (3; --quick: 1)"
    )
    out.add_argument(
        "--steps", type=_positive, help="timed steps of a process, after one warm-up (3; --quick: 2)"
    )
    out.add_argument("--cases", type=_patterns, default=[], metavar="A,B", help="names or wildcards: 'sft/*'")
    out.add_argument("--contestants", type=_patterns, default=[], metavar="A,B", help="names or wildcards")
    out.add_argument("--quick", action="store_true", help="few cases, one round, 32 generated tokens")
    out.add_argument("--list", action="store_true", help="show cases and contestants, run nothing")
    out.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks", metavar="DIR")
    out.add_argument(
        "--models", type=Path, metavar="DIR", help="holds smollm2.gguf and gemma3.gguf (else fetched once)"
    )
    out.add_argument("--cache", type=Path, metavar="DIR", help="keeps models converted for PyTorch")
    out.add_argument(
        "--torch-python", metavar="PATH", help="interpreter with torch, transformers, peft (trl)"
    )
    out.add_argument("--node-dir", type=Path, metavar="DIR", help="holds node_modules/node-llama-cpp")
    out.add_argument("--threads", type=_positive, help="threads of every contestant (all processors)")
    out.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of one process (1800)")
    out.add_argument(
        "--wait-quiet",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="before each process, wait at most so long until others leave the machine alone (0)",
    )
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 0, or 1 if a contestant failed, 2 for a wrong request, 130 if interrupted."""
    args = parser().parse_args(arguments)
    # Measured processes are in sessions of their own: ended like Ctrl-C, none of them stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(args)
    except (UsageError, FileNotFoundError, RetrogradError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _run(args: argparse.Namespace) -> int:
    preset = QUICK if args.quick else FULL
    cases = case_module.select(case_module.all_cases(), args.cases, quick=args.quick)
    chosen = contestant_module.select(contestant_module.all_contestants(), args.contestants)
    chosen = tuple(c for c in chosen if any(c.runs(case) for case in cases))
    options = Options(
        models={},
        cache=(args.cache or cache_dir() / "benchmarks").resolve(),
        threads=args.threads or available_processors(),
        steps=args.steps or preset["steps"],
        warmup=1,
        torch_python=args.torch_python or contestant_module.default_torch_python(),
        node_dir=args.node_dir.resolve() if args.node_dir else None,
        max_tokens=preset["max_tokens"],
    )
    not_run = {c.name: reason for c in chosen if (reason := c.problem(options))}
    if args.list:
        sys.stdout.write(_listing(cases, chosen, not_run))
        return 0
    if asked := [f"{name}: {reason}" for name, reason in not_run.items() if name in args.contestants]:
        raise UsageError("asked for, but cannot run here: " + "; ".join(asked))
    running = tuple(c for c in chosen if c.name not in not_run)
    for name, reason in not_run.items():
        _say(f"{name} is left out: {reason}")
    cases = tuple(case for case in cases if any(c.runs(case) for c in running))
    options = _with_models(options, cases, args.models)
    rounds = args.rounds or preset["rounds"]
    machine, started = describe_machine(), time.time()
    runs: Runs = {}
    interrupted = False
    try:
        measure(
            cases,
            running,
            options,
            rounds=rounds,
            timeout=args.timeout,
            wait_quiet=args.wait_quiet,
            report=_say,
            runs=runs,
        )
    except KeyboardInterrupt:
        interrupted = True
        _say("interrupted: the report holds what was measured until now")
    report = Report(
        machine=machine,
        settings={
            "rounds": rounds,
            "steps": options.steps,
            "warmup": options.warmup,
            "threads": options.threads,
            "quick": args.quick,
            "minutes": round((time.time() - started) / 60, 1),
            "interrupted": interrupted,
        },
        cases=cases,
        titles={c.name: c.title for c in contestant_module.all_contestants()},
        not_run=not_run,
        runs=runs,
        work={name: model_work(path) for name, path in options.models.items()},
    )
    text = to_markdown(report)
    _write(args.out, to_json(report), text)
    sys.stdout.write(text)
    _say(f"written to {args.out}")
    return INTERRUPTED if interrupted else 1 if report.failures() else 0


def _with_models(options: Options, cases: Sequence[case_module.Case], directory: Path | None) -> Options:
    names = dict.fromkeys(case.model for case in cases if case.model)
    paths = resolve(names, directory)
    return attrs.evolve(options, models={name: path.resolve() for name, path in paths.items()})


def _listing(cases: Sequence[case_module.Case], chosen: Sequence[Contestant], not_run: dict[str, str]) -> str:
    lines = [f"{case.name:28} {case.title}" for case in cases]
    lines.append("")
    lines += [
        f"{c.name:28} {c.title}" + (f" — {not_run[c.name]}" if c.name in not_run else "") for c in chosen
    ]
    return "\n".join(lines) + "\n"


def _write(directory: Path, data: dict[str, Any], text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "benchmarks.json").write_text(json.dumps(data, indent=2) + "\n")
    (directory / "benchmarks.md").write_text(text)
    if picture := context_picture.draw(data):
        (directory / "context.svg").write_text(picture)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _patterns(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
