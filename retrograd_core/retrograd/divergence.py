"""How far one model's next-token distributions are from another's."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

PROBE_TEXT = """\
The harbour was quiet when the ferry came in. A few people waited on the quay with their bicycles, and the \
woman from the bakery carried a tray of rolls to the ticket office. "You are late," said the clerk, "but the \
tide does not mind." He stamped three tickets and counted the change: 12.50, 7.25 and 3.

def area(width: float, height: float) -> float:
    \"\"\"Area of a rectangle in square metres.\"\"\"
    return width * height

Q: Which planet is closest to the sun? A: Mercury. Q: How many legs does a spider have? A: Eight.
{"name": "Ada", "age": 36, "languages": ["English", "French"], "active": true}
"""
"""Prose, code, questions and JSON: what distributions are compared on unless the user gives a text."""


@attrs.frozen(kw_only=True)
class Divergence:
    """KL(first ‖ second) in nats a token over `tokens` positions, and how often the top tokens agree."""

    mean: float
    largest: float
    top_agreement: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"KL {self.mean:.3g} nats a token on average, {self.largest:.3g} at most;"
            f" top token agrees at {self.top_agreement:.1%} of {self.tokens} positions"
        )


def divergence(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> Divergence:
    """Compare logits (T, V) of two models over the same tokens, in float64."""
    log_p, log_q = _log_softmax(first), _log_softmax(second)
    kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    return Divergence(
        mean=float(kl.mean()),
        largest=float(kl.max()),
        top_agreement=float(np.mean(log_p.argmax(-1) == log_q.argmax(-1))),
        tokens=int(kl.size),
    )


def _log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
