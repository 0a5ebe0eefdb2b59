"""docs/objectives.md: its loss works as the page says, and no loss or sum is missing from it."""

from __future__ import annotations

import re
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from retrograd import advantages
from retrograd_hookspecs import BuildContext
from retrograd_plugins.losses.grpo import grpo
from retrograd_plugins.losses.grpo_tis import GrpoTis, GrpoTisConfig

from .support import policy_batch

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    """The code block of a file on the page."""
    match = re.search(rf"^`{re.escape(name)}`:\n\n```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert match is not None, name
    return match[1]


@pytest.fixture
def two_sided(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's module, importable by the page's test."""
    module = ModuleType("retrograd_loss_two_sided")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block("retrograd_loss_two_sided.py"), "docs/objectives.md", "exec"), vars(module))
    return module


def test_its_loss_passes_its_test(two_sided: ModuleType) -> None:
    namespace: dict[str, object] = {}
    exec(compile(block("test_two_sided.py"), "docs/objectives.md", "exec"), namespace)
    test = namespace["test_contract"]
    assert callable(test)
    test()


def test_its_loss_by_hand(two_sided: ModuleType) -> None:
    # δ = 3: a ratio of 5 with A = −1 counts −3 and has no gradient; with ratios below 3 it is grpo.
    (component,) = two_sided.retrograd_losses()
    loss = component.build(component.config(delta=3.0), BuildContext(config=None, base_dir=Path()))
    result = loss(policy_batch([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0]))
    assert result.value == pytest.approx(3 - 1.3 + 2)
    assert result.dlogp == pytest.approx([0.0, 0.0, 2.0])
    batch = policy_batch([0.5, 1.0, 2.9], [-1.0, 1.0, -1.0])
    assert loss(batch).dlogp.tolist() == grpo(batch).dlogp.tolist()


def test_every_loss_of_rewards_is_on_the_page() -> None:
    names = {
        point.name
        for point in entry_points(group="retrograd.losses")
        if "policy_losses" in _source(point.value)
    }
    assert {"grpo", "ppo", "cispo", "grpo_tis"} <= names
    for name in names:
        assert f"| `{name}` |" in TEXT, name


def _source(module: str) -> str:
    spec = find_spec(module)
    return Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""


def test_every_sum_and_advantage_is_on_the_page() -> None:
    batch = policy_batch([1.0], [1.0], ref_logp=[-1.0], sampled_logp=np.array([-1.0]))
    for name in GrpoTis(GrpoTisConfig())(batch).metrics:
        assert f"`{name}`" in TEXT, name
    for name, value in vars(advantages).items():
        if callable(value) and getattr(value, "__module__", "") == advantages.__name__ and name[0] != "_":
            assert f"`{name}(" in TEXT, name
