"""The value head of PPO on states such as a real model has: hundreds of numbers with a large common part."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd.advantages import gae
from retrograd_plugins.algorithms._critic import Critic, CriticConfig, unit_length


def test_unit_length() -> None:
    [first, second] = unit_length([np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[-5e8, 0.0]])])
    assert first.tolist() == [[0.6, 0.8], [0.0, 0.0]]
    assert second.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("size", [0.05, 1.0, 45.0, 3000.0])
@pytest.mark.parametrize("reward", [0.5, -2.0])
def test_the_defaults_fit_states_of_any_size(size: float, reward: float) -> None:
    """No fit makes the error much larger, and after six updates the head has found the mean reward.

    The figures of size 45 are those of SmolLM2-135M: 576 numbers, three fifths of the length in common.
    """
    draw = np.random.default_rng(0)
    common = draw.normal(size=576)
    common *= 0.6 / np.linalg.norm(common)
    critic = Critic(CriticConfig(), 576)
    for _ in range(6):
        own = draw.normal(size=(32, 20, 576)) * (0.8 / np.sqrt(576))
        stored = critic.stored(unit_length([size * (common + states) for states in own]))
        rewards = reward + 0.2 * draw.normal(size=32)
        targets = [
            gae(np.append(np.zeros(19), given), values, gamma=1.0, lam=0.95)[1]
            for given, values in zip(rewards, critic.values(stored), strict=True)
        ]
        found = critic.fit(stored, targets)
        # Adam may pass its target by a little when it is nearly there.
        assert found["train/value_loss"] < found["train/value_loss_before"] + 0.1 * reward**2
    assert np.concatenate(critic.values(stored)).mean() == pytest.approx(reward, abs=0.2)
