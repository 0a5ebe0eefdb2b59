"""Agentic runs in Python: the example of the user's guide as it stands, and environments as objects."""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from retrograd import (
    AgenticGRPOConfig,
    ContainerEnvironment,
    LocalEnvironment,
    LoraConfig,
    Scenario,
    Tools,
    Trainer,
    TrainingConfig,
)
from retrograd_hookspecs import StepReport
from retrograd_plugins.environments._sandboxed_profiles import PROFILES
from tests.algorithms.support import SMALL as ENDS_SOON
from tests.containers.engine import PYTHON_IMAGE
from tests.containers.fixtures import Counter
from tests.judges.server import JudgeServer, Request, says

from .support import HOOKS, SMALL, call

EXAMPLE = """
from retrograd import AgenticGRPOConfig, LoraConfig, McpServer, RulerJudge, Scenario, Trainer

config = AgenticGRPOConfig(
    scenarios=(Scenario("math-1", "Use the calculator: 37 + 5"),),
    judge=RulerJudge(base_url="https://api.openai.com/v1", model="gpt-5-mini"),
    mcp_servers=(McpServer(name="calc", command=("python3", "calculator_server.py")),),
    updates=10,
    group_size=8,
)

with Trainer("model.gguf", lora=LoraConfig()) as trainer:
    trainer.fit_agentic_grpo(config, callback=print)
    trainer.save_adapter("agent.gguf")
"""

CALCULATOR = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: float, b: float) -> str:
    '''Add.'''
    return f"{a + b:g}"


server.run()
"""


def by_text(request: Request) -> str:
    """Scores that are a function of what a trajectory says."""
    scores = [
        {"id": number, "explanation": "seen", "score": zlib.crc32(text.encode()) % 11 / 10}
        for number, text in request.candidates.items()
    ]
    return json.dumps({"scores": scores})


def test_the_example_runs_as_it_stands(
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    server: JudgeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But for the address of the judge and the number of updates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    model = tiny_model(**{**ENDS_SOON, "context_length": 4096})
    (tmp_path / "model.gguf").symlink_to(model)
    (tmp_path / "calculator_server.py").write_text(CALCULATOR)
    server.always = says(by_text)
    exec(EXAMPLE.replace("https://api.openai.com/v1", server.url).replace("updates=10", "updates=2"), {})
    printed = capsys.readouterr().out
    assert printed.count("StepReport(") >= 2
    assert (tmp_path / "agent.gguf").read_bytes()[:4] == b"GGUF"
    assert len(server.requests) == 2
    assert "37 + 5" in server.requests[0].user
    assert server.requests[0].headers["Authorization"] == "Bearer a key"


def test_tools_on_the_host(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """The environment `local` with the toolset `base`; its commands are those of the script."""
    environment = LocalEnvironment(Tools("base"), allow_unsandboxed=True)
    write_five(environment, tmp_path, tiny_model, call("bash", command="printf 5 > answer.txt"))


def test_tools_in_a_container(tmp_path: Path, tiny_model: Callable[..., Path], docker: Counter) -> None:
    """The environment of the user's guide as it stands, in a real container. Its default image, which would
    be built from one of a registry, is another name of the tests' own."""
    image = PROFILES["python"].image
    docker.api.tag(PYTHON_IMAGE, *image.split(":"))
    try:
        code = "open('answer.txt', 'w').write(str(2 + 3))"
        environment = ContainerEnvironment(Tools("python"))
        metrics = write_five(environment, tmp_path, tiny_model, call("python", code=code))
        assert metrics["env/created"] >= 1
        assert metrics["agent/tool_error_fraction"] == 0
    finally:
        docker.api.remove_image(image)


def write_five(
    environment: Any, tmp_path: Path, tiny_model: Callable[..., Path], turn: str
) -> Mapping[str, float]:
    """Train on a task that the first member of the group solves with one call; the update's metrics."""
    (tmp_path / "hooks.py").write_text(HOOKS)
    script = {"0": [turn, "Done."], "*": ["I do not know."]}
    (tmp_path / "script.json").write_text(json.dumps(script))
    verify = {"command": ["grep", "-q", "5", "answer.txt"], "reward_on_success": 1.0}
    config = AgenticGRPOConfig(
        scenarios=(Scenario("five", "Write 5 into answer.txt.", metadata={"env": {"verify": verify}}),),
        environment=environment,
        group_size=2,
        epochs_per_update=1,
        max_new_tokens_per_turn=160,
    )
    reports: list[StepReport] = []
    with Trainer(
        tiny_model(**{**SMALL, "context_length": 4096}),
        lora=LoraConfig(rank=2),
        training=TrainingConfig(ctx=4096, micro_batch=256, lr=1e-3),
        device="reference",
        tables={"plugins": {"load": [str(tmp_path / "hooks.py")]}},
    ) as trainer:
        result: Any = trainer.fit_agentic_grpo(config, callback=reports.append)
    assert result.outcome == "finished"
    assert reports[0].metrics["reward/mean"] == 0.5
    assert reports[0].metrics["agent/turns_mean"] == 1.5
    return reports[0].metrics
