"""`retrograd-reasoning-gym`: write a scenario file of a dataset."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograd.agent import scenario_record
from retrograd_hookspecs import Scenario

from .tasks import Source, TaskError, Tasks

USER = "Solve the task below. Think first, then call submit_answer with the answer alone."


def scenarios(source: Source, indices: range, *, user: str = USER) -> list[Scenario]:
    """A scenario for each task. Raises: `TaskError` for one that cannot be made."""
    tasks = Tasks()
    env: dict[str, Any] = {"dataset": source.dataset, "size": source.size, "seed": source.seed}
    if source.options:
        env["options"] = dict(source.options)
    found = []
    for index in indices:
        tasks.task(source, index)
        metadata = {"env": {**env, "index": index}}
        found.append(Scenario(id=f"{source.dataset}-{source.seed}-{index}", user=user, metadata=metadata))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="retrograd-reasoning-gym", description=__doc__)
    parser.add_argument("dataset", help="name of the dataset, such as chain_sum")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--count", type=int, default=100, help="scenarios (default: 100)")
    parser.add_argument("--first", type=int, default=0, help="index of the first task (default: 0)")
    parser.add_argument("--size", type=int, help="tasks of the dataset (default: as many as are needed)")
    parser.add_argument("--seed", type=int, default=42, help="seed of the dataset (default: 42)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="key of the dataset, may be repeated",
    )
    parser.add_argument("--user", default=USER, help="the user's message, which the question follows")
    given = parser.parse_args(arguments)
    last = given.first + given.count
    try:
        options = dict(_option(text) for text in given.option)
        source = Source(dataset=given.dataset, size=given.size or last, seed=given.seed, options=options)
        found = scenarios(source, range(given.first, last), user=given.user)
    except TaskError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    lines = (json.dumps(scenario_record(scenario), ensure_ascii=False) + "\n" for scenario in found)
    given.out.write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"{len(found)} scenarios in {given.out}\n")
    return 0


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise TaskError(f"--option {text!r} is not KEY=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
