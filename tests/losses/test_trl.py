"""Values and gradients equal those of TRL's trainer where the objective is the same.

`trl_fixture.py` writes the numbers and says how to redraw them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd_hookspecs import Loss, LossBatch, PolicyObjective
from retrograd_plugins.losses.cispo import Cispo, CispoConfig
from retrograd_plugins.losses.grpo import grpo
from retrograd_plugins.losses.grpo_tis import GrpoTis, GrpoTisConfig

from .support import sapo

STORED = json.loads(Path(__file__).with_name("trl_grpo.json").read_text())
MASK = np.array(STORED["mask"], np.bool_)
TOKENS = MASK.sum(axis=1)


def loss_of(name: str) -> Loss:
    if "capped" in name:
        return GrpoTis(GrpoTisConfig(cap=STORED["cap"]))
    kinds: dict[str, Loss] = {
        "dr_grpo": grpo,
        "cispo": Cispo(CispoConfig()),
        "sapo": sapo(tau_negative=1.125),
    }
    return kinds[name.split(",")[0]]


def batch_of(name: str, case: dict[str, Any]) -> LossBatch:
    arrays = {key: np.array(value) for key, value in STORED["arrays"].items()}
    advantage = arrays["token_advantage"] if case["per_token"] else arrays["advantage"][:, None]
    rows = np.broadcast_to(np.arange(len(MASK))[:, None], MASK.shape)
    weight = np.ones(TOKENS.sum())
    normalizer = float(len(MASK) * STORED["budget"])  # Dr. GRPO
    if name.startswith("cispo"):  # over the tokens of the batch
        normalizer = float(TOKENS.sum())
    if name.startswith("sapo"):  # over each answer, then over answers
        weight, normalizer = 1 / TOKENS[rows[MASK]], float(len(MASK))
    return LossBatch(
        logp=arrays["logp"][MASK],
        weight=weight,
        sequence=rows[MASK].astype(np.int64),
        position=np.nonzero(MASK)[1],
        normalizer=normalizer,
        extra={
            "old_logp": arrays["old_logp"][MASK],
            "ref_logp": arrays["ref_logp"][MASK],
            "sampled_logp": arrays["sampled_logp"][MASK],
            "advantage": np.broadcast_to(advantage, MASK.shape)[MASK],
            "sequence_tokens": TOKENS[rows[MASK]].astype(np.float64),
        },
        objective=PolicyObjective(
            clip_low=case["clip_low"],
            clip_high=case["clip_high"],
            level=case["level"],
            kl_coefficient=case["beta"],
        ),
    )


@pytest.mark.parametrize("name", STORED["cases"])
def test_equals_trl(name: str) -> None:
    case = STORED["cases"][name]
    result = loss_of(name)(batch_of(name, case))
    gradient = np.array(case["gradient"])
    assert result.value == pytest.approx(case["value"], rel=1e-12)
    np.testing.assert_allclose(result.dlogp, gradient[MASK], rtol=1e-12, atol=1e-15)
    assert not gradient[~MASK].any()
    if name.startswith("dr_grpo"):  # the numbers reach both sides of the clip
        assert result.metrics["clipped_low"] > 0
        assert result.metrics["clipped_high"] > 0
