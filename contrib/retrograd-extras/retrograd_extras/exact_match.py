"""A reward for answers that are known: 1 where the completion is the expected text, else 0.

The prompt's record holds what is expected, a text or number, or a list of which any will do::

    {"messages": [{"role": "user", "content": "What is 2 + 2? Answer with the number."}], "answer": 4}

::

    [grpo]
    reward = "exact_match"

    [reward.exact_match]
    field = "answer"
    ignore_case = true

White space around either text does not count. A record without the field has no reward: its answers are
"missing", not wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from retrograd_hookspecs import Answer, BuildContext, Component, Reward, Score, hookimpl, key


@attrs.frozen(kw_only=True)
class ExactMatchConfig:
    """Keys of `[reward.exact_match]`."""

    field: str = key("answer", doc="Field of the prompt's record with the expected text.")
    ignore_case: bool = key(False, doc="Upper and lower case are the same.")


class ExactMatch:
    """Compares completions with a field of their record."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self._config = config

    def score(self, answers: Sequence[Answer]) -> Sequence[Score]:
        """1 or 0 per answer, in order."""
        return [self._one(answer) for answer in answers]

    def close(self) -> None:
        """Nothing is held."""

    def _one(self, answer: Answer) -> Score:
        field = self._config.field
        if field not in answer.metadata:
            return Score(kind="missing", explanation=f"the record has no field {field!r}")
        value = answer.metadata[field]
        expected = value if isinstance(value, list | tuple) else [value]
        if not expected:
            return Score(kind="error", explanation=f"{field!r} is an empty list: no answer could be right")
        for item in expected:
            if isinstance(item, bool) or not isinstance(item, str | int | float):
                return Score(
                    kind="error", explanation=f"{field!r} must be a text, a number, or a list, got {item!r}"
                )
        texts = {self._folded(str(item)) for item in expected}
        return Score(kind="value", value=float(self._folded(answer.completion) in texts))

    def _folded(self, text: str) -> str:
        text = text.strip()
        return text.casefold() if self._config.ignore_case else text


def _build(config: ExactMatchConfig, context: BuildContext) -> Reward:
    return ExactMatch(config)


@hookimpl
def retrograd_rewards() -> list[Component[ExactMatchConfig, Reward]]:
    """`exact_match`."""
    return [
        Component(
            name="exact_match",
            config=ExactMatchConfig,
            build=_build,
            summary="1 where the completion is the expected text, else 0.",
        )
    ]
