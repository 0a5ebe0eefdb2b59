"""The example agent-fix-tests in real containers: right fixes earn 1, everything else 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio

from retrograd.agent import load_scenarios
from retrograd.testing.environments import Action, play
from retrograd_hookspecs import EnvironmentProvider
from tests.agent.support import EVERY, SMALL, call
from tests.containers.engine import PYTHON_IMAGE
from tests.containers.fixtures import Counter, docker, docker_engine

from .agent_examples import EXAMPLES, Example, environment

__all__ = ["docker", "docker_engine"]

IMAGE = ("agent.environment.profile=custom", f"agent.environment.image={PYTHON_IMAGE}")
FIXES: dict[str, dict[str, str]] = {
    "intervals": {
        "first <= merged[-1][1]:": "first <= merged[-1][1] + 1:",
        "(merged[-1][0], last)": "(merged[-1][0], max(last, merged[-1][1]))",
    },
    "pages": {"len(items) // size": "-(-len(items) // size)", "number * size": "(number - 1) * size"},
    "roman": {
        'LETTERS = [(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]': (
            'LETTERS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC")]\n'
            'LETTERS += [(50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]'
        )
    },
    "cache": {
        "        return self.entries.get(key)": (
            "        if key in self.entries:\n            self.entries[key] = self.entries.pop(key)\n"
            "        return self.entries.get(key)"
        ),
        "        self.entries[key] = value": (
            "        self.entries.pop(key, None)\n        self.entries[key] = value"
        ),
        "self.entries.popitem()": "del self.entries[next(iter(self.entries))]",
    },
    "words": {
        "from collections import Counter": "import re\nfrom collections import Counter",
        "Counter(text.split()).most_common(count)": (
            'sorted(Counter(re.findall(r"[a-z]+", text.lower())).items(),'
            " key=lambda word: (-word[1], word[0]))[:count]"
        ),
    },
    "clock": {
        "int(hours) * 60": "(int(hours) % 12 if half else int(hours)) * 60",
        'f"{minutes // 60}:{minutes % 60}"': 'f"{minutes // 60 % 24:02}:{minutes % 60:02}"',
    },
}  # fmt: skip


def edits(name: str) -> list[Action]:
    """The right fix."""
    found: list[Action] = [
        ("edit_file", {"path": f"{name}.py", "old_text": old, "new_text": new})
        for old, new in FIXES[name].items()
    ]
    return [*found, ("run_tests", {}), ("submit", {})]


def cheats(name: str) -> dict[str, list[Action]]:
    """What must earn nothing."""
    test, program = f"test_{name}.py", f"{name}.py"
    return {
        "nothing": [("submit", {})],
        "an edit that mends nothing": [
            ("bash", {"command": f"echo '# mended' >>{program}"}), ("submit", {}),
        ],
        "tests that pass": [
            ("write_file", {"path": test, "content": "def test_nothing():\n    pass\n"}), ("submit", {}),
        ],
        "no tests": [("bash", {"command": f"rm {test}"}), ("submit", {})],
    }  # fmt: skip


def provider_of_example() -> EnvironmentProvider:
    """The environment of the example, with the image of the tests."""
    keys = {name: value for name, _, value in (setting.partition("=") for setting in IMAGE)}
    return environment(
        "agent-fix-tests", "agent-fix-tests.toml", keys | {"agent.environment.pool.max_live": 2}
    )


def test_right_and_wrong_fixes_are_told_apart(docker: Counter) -> None:
    folder = EXAMPLES / "agent-fix-tests"
    tasks = [*load_scenarios(folder / "scenarios.jsonl"), *load_scenarios(folder / "heldout.jsonl")]
    assert {task.id for task in tasks} == set(FIXES)
    rewards: dict[tuple[str, str], float] = {}

    async def run() -> None:
        provider = provider_of_example()
        try:
            await provider.prepare(tasks)
            for number, task in enumerate(tasks):
                tried = {"the fix": edits(task.id)} | (cheats(task.id) if number == 0 else {})
                tried |= {"nothing": [("submit", {})]}
                for name, actions in tried.items():
                    episode = await play(provider, task, actions)
                    assert episode.score.kind == "value", episode.score
                    rewards[task.id, name] = episode.score.value
                    failed = [o for o in episode.observations[:-2] if o[1]]
                    assert not failed or name != "the fix", failed
                    if name == "the fix":
                        assert "passed" in episode.observations[-2][0]
                        assert episode.state is not None
                        assert f"b/{task.id}.py" in episode.state
        finally:
            await provider.close()

    anyio.run(run)
    assert {key for key, reward in rewards.items() if reward == 1.0} == {
        (task.id, "the fix") for task in tasks
    }
    assert {reward for (_, name), reward in rewards.items() if name != "the fix"} == {0.0}


def test_hidden_tests_find_what_was_made_for_the_visible_ones(docker: Counter) -> None:
    folder = EXAMPLES / "agent-fix-tests"
    [task] = [task for task in load_scenarios(folder / "scenarios.jsonl") if task.id == "roman"]
    known = '"""Roman numerals."""\n\n\ndef to_roman(number):\n    return {known}[number]\n'
    table = {3: "III", 8: "VIII", 4: "IV", 90: "XC", 2024: "MMXXIV"}
    text = known.replace("{known}", repr(table))
    actions: list[Action] = [
        ("write_file", {"path": "roman.py", "content": text}), ("run_tests", {}), ("submit", {}),
    ]  # fmt: skip

    async def run() -> tuple[str, float]:
        provider = provider_of_example()
        try:
            await provider.prepare([task])
            episode = await play(provider, task, actions)
            return episode.observations[1][0], episode.score.value
        finally:
            await provider.close()

    shown, reward = anyio.run(run)
    assert "5 passed" in shown
    assert reward == 0.0


def test_an_update_of_fixing_tests(docker: Counter, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(**(SMALL | {"context_length": 8192}))
    example = Example("agent-fix-tests", tmp_path, model, *IMAGE, "agent.environment.pool.max_live=2")
    fix = [call(name, **arguments) for name, arguments in edits("intervals") if name != "run_tests"]
    # The second looks around and gives up.
    example.script({0: fix, EVERY: [call("list_dir"), call("submit")]})
    short = {
        "agent__updates": 1, "agent__scenarios_per_update": 1, "agent__group_size": 2,
        "evaluation__max_examples": 1,
    }  # fmt: skip
    assert "error" not in example.scripted("check", "agent-fix-tests.toml", **short).out
    example.scripted("train", "agent-fix-tests.toml", **short)
    [update] = example.updates("agent.metrics.jsonl")
    assert update["reward/mean"] == 0.5
    assert update["agent/turns_mean"] == (len(fix) + 2) / 2
    assert update["optimizer/grad_norm"] > 0
    shown = (example / "observed" / "observe.jsonl").read_text()
    assert "max(last, merged[-1][1])" in shown
