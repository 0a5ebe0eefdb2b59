"""Which tasks of the tiled attention backward wait for which others."""

from __future__ import annotations

import numpy as np
import pytest

from retrograd_plugins.kernels.cpu._attention_turns import FINISHED, needed_progress

PROMPT = [0, 100, 0, 0, 0]
ANSWER = [100, 40, 0, 100, 100]
OTHER_ANSWER = [140, 30, 0, 100, 140]
APART = [170, 50, 0, 0, 200]
ELSEWHERE = [220, 10, 50, 20, 300]
"""Sees rows 50 to 70, at positions where the prompt's keys are not."""


@pytest.mark.parametrize(
    ("before", "segment", "needed"),
    [
        (PROMPT, PROMPT, 64),
        (PROMPT, ANSWER, 64),
        (ANSWER, OTHER_ANSWER, 64),
        (ANSWER, APART, 0),
        (APART, PROMPT, 0),
        (ANSWER, ELSEWHERE, FINISHED),
        (ELSEWHERE, ANSWER, FINISHED),
    ],
)
def test_rows_are_added_in_the_order_of_tasks(before: list[int], segment: list[int], needed: int) -> None:
    assert needed_progress(np.array(before), np.array(segment), 64) == needed
