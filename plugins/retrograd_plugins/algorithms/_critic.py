"""The critic of PPO: a linear value head on the model's final hidden states.

V(h) = w·h/‖h‖ + b, zero at the start. It is fitted to value targets by full-batch passes of Adam on the mean
squared error, after the advantages of an update were taken with it; no gradient reaches the model. A hidden
state is hundreds of numbers of any size: were it not brought to length 1, one step of `value_lr` could move V
far past its targets.

Sources: Schulman et al. 2016 (value targets), Kingma & Ba 2015 (Adam).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import ConfigTable, Problem, key

if TYPE_CHECKING:
    from retrograd_hookspecs.training import FloatArray

Vector = npt.NDArray[np.float64]

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8
_SMALLEST = 1e-30
"""Below every length of a hidden state but 0."""


@attrs.frozen(kw_only=True)
class CriticConfig:
    """A value head, and advantages that are estimated with it (GAE)."""

    enabled: bool = key(True, doc="Use a value head and GAE advantages; false whitens the rewards instead.")
    gamma: float = key(1.0, above=0.0, maximum=1.0, doc="Discount.")
    gae_lambda: float = key(0.95, minimum=0.0, maximum=1.0, doc="GAE λ.")
    value_lr: float = key(0.01, above=0.0, doc="Learning rate of the value head.")
    value_epochs: int = key(8, minimum=1, doc="Passes of the value head per update.")
    feature_dtype: Literal["f32", "f16", "bf16"] = key(
        "f32", doc="Precision of the stored hidden states that the value head reads."
    )


def check_critic(config: CriticConfig, table: ConfigTable) -> list[Problem]:
    """Without a value head the other keys say nothing."""
    names = [name for name in attrs.fields_dict(CriticConfig) if name != "enabled" and name in table]
    return [
        Problem(
            where=table.where(name),
            key=f"{table.name}.{name}",
            message="has no effect with enabled = false",
            hint="leave it out, or set enabled = true",
        )
        for name in names
        if not config.enabled
    ]


def unit_length(hidden: Sequence[FloatArray]) -> list[FloatArray]:
    """Hidden states (n, E) of each answer, each state divided by its length; a state of zeros stays."""
    return [h / np.maximum(np.linalg.norm(h, axis=1, keepdims=True), _SMALLEST) for h in hidden]


class Critic:
    """The value head with its optimizer. `width` is that of the hidden states (E)."""

    def __init__(self, config: CriticConfig, width: int) -> None:
        self._config = config
        self._weights: Vector = np.zeros(width + 1)
        """(E + 1,): w, then b."""
        self._first: Vector = np.zeros(width + 1)
        self._second: Vector = np.zeros(width + 1)
        self._steps = 0

    def stored(self, features: Sequence[FloatArray]) -> list[npt.NDArray[Any]]:
        """Hidden states (n, E) of each answer, kept in `feature_dtype` (bf16 as its upper 16 bits)."""
        dtype = self._config.feature_dtype
        if dtype == "f16":
            return [np.asarray(f, np.float16) for f in features]
        if dtype == "bf16":
            return [_to_bf16(np.ascontiguousarray(f, np.float32)) for f in features]
        return [np.asarray(f, np.float32) for f in features]

    def values(self, stored: Sequence[npt.NDArray[Any]]) -> list[Vector]:
        """V before each token, (n,) an answer."""
        return [_widened(f) @ self._weights[:-1] + self._weights[-1] for f in stored]

    def fit(self, stored: Sequence[npt.NDArray[Any]], targets: Sequence[Vector]) -> dict[str, float]:
        """Fit to the value targets; mean squared error before and after, and the explained variance."""
        features = np.concatenate([_widened(f) for f in stored])
        target = np.concatenate(targets)
        before = self._error(features, target)
        for _ in range(self._config.value_epochs):
            residual = features @ self._weights[:-1] + self._weights[-1] - target
            gradient = np.append(features.T @ residual, residual.sum()) * (2.0 / target.size)
            self._step(gradient)
        after = self._error(features, target)
        variance = float(target.var())
        return {
            "train/value_loss_before": before,
            "train/value_loss": after,
            "train/value_explained_variance": 1.0 - before / variance if variance else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """Weights and moments."""
        return {
            "weights": self._weights,
            "first_moment": self._first,
            "second_moment": self._second,
            "steps": self._steps,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`."""
        self._weights = np.array(state["weights"])
        self._first = np.array(state["first_moment"])
        self._second = np.array(state["second_moment"])
        self._steps = int(state["steps"])

    def _error(self, features: Vector, target: Vector) -> float:
        return float(np.mean((features @ self._weights[:-1] + self._weights[-1] - target) ** 2))

    def _step(self, gradient: Vector) -> None:
        self._steps += 1
        self._first = _BETA1 * self._first + (1 - _BETA1) * gradient
        self._second = _BETA2 * self._second + (1 - _BETA2) * gradient**2
        first = self._first / (1 - _BETA1**self._steps)
        second = self._second / (1 - _BETA2**self._steps)
        self._weights = self._weights - self._config.value_lr * first / (np.sqrt(second) + _EPS)


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even. Hidden states are finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _widened(stored: npt.NDArray[Any]) -> Vector:
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)
