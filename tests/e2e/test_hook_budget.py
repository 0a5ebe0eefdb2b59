"""At most ten hook calls an optimizer step, however many tokens it has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from retrograd.cli.document import open_document
from retrograd.progress import SilentReporter
from retrograd.session import open_run

from .support import Workspace, chats, hook_file, write_jsonl

BUDGET = 10


def calls_by_step(workspace: Workspace, **tables: Any) -> list[Counter[str]]:
    """Hook calls of each optimizer step, counted in a real run by pluggy itself."""
    hook_file(workspace / "watch.py", "@hookimpl\ndef retrograd_step_finished(run, report):\n    pass\n")
    path = workspace.toml(plugins={"load": ["watch.py"]}, **tables)
    run, assembly = open_run(open_document(path), SilentReporter())
    steps: list[Counter[str]] = [Counter()]

    def before(name: str, implementations: Any, arguments: Any) -> None:
        steps[-1][name] += 1

    def after(outcome: Any, name: str, implementations: Any, arguments: Any) -> None:
        if name == "retrograd_step_finished":
            steps.append(Counter())

    assembly.session._manager.add_hookcall_monitoring(before, after)
    result = run.execute()
    assert len(steps) == result.steps + 1
    # What follows the last step (evaluation, checkpoint, the end of the run) belongs to it.
    last = steps.pop()
    steps[-1] += last
    return steps


@pytest.mark.parametrize("tokens", [30, 200])
def test_budget(workspace: Workspace, tokens: int) -> None:
    records = chats(range(24))
    for record in records:
        record["messages"][0]["content"] += " user" * tokens
    write_jsonl(workspace / "train.jsonl", records)
    write_jsonl(workspace / "heldout.jsonl", records[:2])
    steps = calls_by_step(
        workspace,
        training={"ctx": 512, "micro_batch": 64, "gradient_accumulation": 2},
        evaluation={"data": "heldout.jsonl"},
        checkpoint={"directory": "checkpoints", "mode": "steps_and_best_eval", "every_steps": 1},
    )
    assert max(calls.total() for calls in steps) <= BUDGET
    names = set().union(*steps)
    assert names - {"retrograd_select_kernel"} == {
        "retrograd_run_started",
        "retrograd_step_finished",
        "retrograd_evaluated",
        "retrograd_checkpoint_saved",
        "retrograd_run_finished",
    }
    # Kernels are selected once a run. A step in the middle calls two hooks, whatever its size.
    expected = {"retrograd_step_finished": 1, "retrograd_checkpoint_saved": 1}
    assert [dict(calls) for calls in steps[1:-1]] == [expected] * (len(steps) - 2)
