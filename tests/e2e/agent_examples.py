"""The examples of agentic runs in tests: loaded, copied, and run with a script for the model's tokens."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from retrograd.assembly import assemble
from retrograd.config import load_document
from retrograd.metrics import read_metrics
from retrograd_hookspecs import EnvironmentProvider

from .support import Outcome, retrograd

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HOOKS = """\
from pathlib import Path
from tests.agent.support import scripted_samplers

retrograd_samplers = scripted_samplers(Path(__file__).with_name("script.json"))
"""


@contextmanager
def module_of(example: str, name: str) -> Iterator[ModuleType]:
    """A module of an example, which is in no package; it imports its neighbours."""
    folder = EXAMPLES / example
    spec = importlib.util.spec_from_file_location(f"{example}/{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(folder))
        for added in set(sys.modules) - before:
            if getattr(sys.modules[added], "__file__", None) == str(folder / f"{added}.py"):
                del sys.modules[added]


def records(path: Path) -> list[dict[str, Any]]:
    """Lines of JSONL."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def environment(example: str, toml: str, settings: Mapping[str, Any]) -> EnvironmentProvider:
    """The environment as the run builds it; no model is loaded, so any file is one."""
    document = load_document(EXAMPLES / example / toml)
    for name, value in {"model.path": __file__, "lora": {"rank": 8}, **settings}.items():
        document = document.with_value(name, value, where="the test")
    provider: EnvironmentProvider = assemble(document).build(
        "environments", document.get("agent.environment.type")
    )
    return provider


class Example:
    """A copy of an example, run with the tiny model; `script` is what the model writes in agentic runs."""

    def __init__(self, name: str, directory: Path, model: Path, *settings: str) -> None:
        self.folder = shutil.copytree(EXAMPLES / name, directory / name)
        (self.folder / "script.py").write_text(HOOKS, encoding="utf-8")
        self._options: list[object] = ["--model", model, "--device", "reference"]
        # The tiny model writes more tokens for the same text.
        more = ["training.ctx=8192", "training.micro_batch=1024", *settings]
        self._options += [part for setting in more for part in ("--set", setting)]

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def script(self, turns: Mapping[int | str, Sequence[str]]) -> None:
        """What the model writes, by trajectory and turn."""
        (self / "script.json").write_text(json.dumps({str(name): list(said) for name, said in turns.items()}))

    def run(
        self, command: str, toml: str, *arguments: object, code: int | None = 0, **more: object
    ) -> Outcome:
        """`retrograd COMMAND`; `more` are settings, with `__` for the dot."""
        extra = [
            part for name, value in more.items() for part in ("--set", f"{name.replace('__', '.')}={value}")
        ]
        return retrograd(command, self / toml, *arguments, *self._options, *extra, code=code)

    def scripted(self, command: str, toml: str, *arguments: object, **more: object) -> Outcome:
        """An agentic command whose tokens the script chooses."""
        loaded = tomllib.loads((self / toml).read_text()).get("plugins", {}).get("load", [])
        files = [str(self / name) for name in (*loaded, "script.py")]
        limits = {"agent__max_trajectory_tokens": 8192, "agent__max_new_tokens_per_turn": 1024}
        return self.run(command, toml, *arguments, plugins__load=json.dumps(files), **(limits | more))

    def updates(self, name: str) -> list[dict[str, Any]]:
        """Records of updates in a metrics file."""
        return [record for record in read_metrics(self / name) if "train/update" in record]
