"""What the tests of the environments `container` and `local` share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from retrograd.assembly import assemble
from retrograd.config import Document
from retrograd.testing.environments import Action
from retrograd_hookspecs import Environment, EnvironmentProvider, Scenario, Score, StepResult
from tests.containers.engine import PYTHON_IMAGE

BUG = "def add(a, b):\n    return a - b\n"
FIX = "def add(a, b):\n    return a + b\n"
TEST = "from src.sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
FILES = {"src/__init__.py": "", "src/sums.py": BUG, "tests/test_sums.py": TEST}
VERIFY = {"command": ["python3", "-m", "pytest", "-q", "tests"], "reward_on_success": 2.0}


def scenario(**env: Any) -> Scenario:
    """A task: mend `src/sums.py`."""
    env = {"files": FILES, "verify": VERIFY, "setup": [], **env}
    return Scenario(id="sums", user="Mend add.", metadata={"env": env}, origin="scenarios.jsonl:1")


def provider_of(directory: Path, type: str = "container", **keys: Any) -> EnvironmentProvider:
    """An environment as a run builds it, from its table."""
    for name in ("model.gguf", "scenarios.jsonl"):
        (directory / name).touch()
    own: dict[str, Any] = {"tools": {"default": "python", "scenario_toolsets": ["base"]}}
    if type == "container":
        own |= {
            "profile": "custom",
            "image": PYTHON_IMAGE,
            "limits": {"memory_mb": 256},
            "pool": {"max_live": 2},
        }
    else:
        own |= {"allow_unsandboxed": True}
    values: dict[str, Any] = {
        "run": {"algorithm": "agent_grpo"},
        "model": {"path": str(directory / "model.gguf")},
        "output": {"path": str(directory / "out.gguf")},
        "lora": {},
        "training": {"ctx": 1024, "micro_batch": 32},
        "agent": {
            "scenarios": str(directory / "scenarios.jsonl"),
            "environment": {"type": type, **own, **keys},
        },
    }
    assembly = assemble(Document.from_values(values))
    provider: EnvironmentProvider = assembly.build("environments", type)
    return provider


def with_world(
    provider: EnvironmentProvider, task: Scenario, use: Callable[[Environment], Awaitable[Any]]
) -> Any:
    """`use(world)` in a world that was reset; everything is closed."""

    async def run() -> Any:
        try:
            await provider.prepare([task])
            world = await provider.acquire(task)
            try:
                await world.reset(task, 0)
                return await use(world)
            finally:
                await world.close()
        finally:
            await provider.close()

    return anyio.run(run)


def played(
    provider: EnvironmentProvider, task: Scenario, actions: Sequence[Action]
) -> tuple[list[StepResult], Score, str | None]:
    """What actions gave, the score, and the final state."""

    async def use(world: Environment) -> tuple[list[StepResult], Score, str | None]:
        results = [await world.step(name, arguments) for name, arguments in actions]
        return results, await world.grade(), await world.state()

    found: tuple[list[StepResult], Score, str | None] = with_world(provider, task, use)
    return found


def write(path: str, text: str) -> Action:
    return "write_file", {"path": path, "content": text}


def bash(command: str) -> Action:
    return "bash", {"command": command}
