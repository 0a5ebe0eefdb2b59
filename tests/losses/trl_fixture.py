"""Losses and gradients of TRL's own code on fixed numbers, for `test_trl.py`.

Redraw `trl_grpo.json` where PyTorch and TRL are installed::

    pip install torch trl
    python tests/losses/trl_fixture.py

It calls `GRPOTrainer._compute_loss` on a trainer without a model: log-probabilities are given, padded on
the right, with the tokens of tools masked, and autograd differentiates by them in float64.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TARGET = Path(__file__).with_name("trl_grpo.json")
LENGTHS = (5, 3, 7, 2)
BUDGET = 8
"""`max_completion_length`: what dr_grpo divides by, together with the number of answers."""
CAP = 1.5
CASES: dict[str, dict[str, Any]] = {
    "dr_grpo, token": {"loss_type": "dr_grpo"},
    "dr_grpo, token, kl": {"loss_type": "dr_grpo", "beta": 0.3},
    "dr_grpo, token, own advantages": {"loss_type": "dr_grpo", "per_token": True},
    "dr_grpo, token, capped": {"loss_type": "dr_grpo", "beta": 0.3, "capped": True},
    "dr_grpo, sequence": {"loss_type": "dr_grpo", "level": "sequence"},
    "dr_grpo, sequence, kl": {"loss_type": "dr_grpo", "level": "sequence", "beta": 0.3},
    "cispo, token, kl": {"loss_type": "cispo", "beta": 0.3},
    "sapo, token": {"loss_type": "sapo"},
}


def main() -> None:
    """Write `trl_grpo.json`."""
    import torch
    import trl

    torch.manual_seed(20250801)
    shape = (len(LENGTHS), max(LENGTHS))
    completion = torch.zeros(shape, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        completion[row, :length] = 1
    tool = completion.clone()
    tool[2, 2:4] = 0  # an observation inside the third answer
    noise = torch.rand(3, *shape, dtype=torch.float64)
    old = -3 * torch.rand(shape, dtype=torch.float64) - 0.1
    arrays = {
        "old_logp": old,
        # The first answer rose and the second fell by so much that a ratio of the sequence is clipped too.
        "logp": old + 0.8 * (noise[0] - 0.5) + torch.tensor([[0.3], [-0.4], [0.0], [-0.1]]),
        "ref_logp": old + 0.6 * (noise[1] - 0.5),
        "sampled_logp": old + 1.2 * (noise[2] - 0.5),
        "advantage": torch.tensor([1.0, -0.75, 0.5, -1.25], dtype=torch.float64),
        "token_advantage": torch.randn(shape, dtype=torch.float64),
    }
    cases = {name: _case(arrays, completion, tool, settings) for name, settings in CASES.items()}
    text = json.dumps(
        {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "budget": BUDGET,
            "cap": CAP,
            "mask": (completion * tool).tolist(),
            "arrays": {name: array.tolist() for name, array in arrays.items()},
            "cases": cases,
        }
    )
    TARGET.write_text(text.replace('], "', '],\n "').replace('}, "', '},\n "') + "\n")


def _case(arrays: dict[str, Any], completion: Any, tool: Any, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from trl import GRPOTrainer

    objective = {"clip_low": 0.2, "clip_high": 0.28, "beta": settings.get("beta", 0.0)}
    logp = arrays["logp"].clone().requires_grad_()
    trainer = object.__new__(GRPOTrainer)
    vars(trainer).update(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.125,  # exact in float32, which TRL holds it in
            steps_per_generation=1,
        ),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        loss_type=settings["loss_type"],
        importance_sampling_level=settings.get("level", "token"),
        beta=objective["beta"],
        epsilon_low=objective["clip_low"],
        # What TRL calls epsilon_high for cispo is the bound itself.
        epsilon_high=objective["clip_high"] + (settings["loss_type"] == "cispo"),
        max_completion_length=BUDGET,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=settings.get("capped", False),
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )
    empty = torch.zeros((len(LENGTHS), 0), dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": completion,
            "completion_mask": completion,
            "tool_mask": tool,
            "advantages": arrays["token_advantage" if settings.get("per_token") else "advantage"],
            "old_per_token_logps": arrays["old_logp"],
            "ref_per_token_logps": arrays["ref_logp"],
            "num_items_in_batch": (completion * tool).sum(),
            "importance_sampling_ratio": torch.clamp(
                torch.exp(arrays["old_logp"] - arrays["sampled_logp"]), max=CAP
            ),
        },
    )
    loss.backward()
    return {
        **objective,
        "level": settings.get("level", "token"),
        "per_token": settings.get("per_token", False),
        "value": loss.item(),
        "gradient": logp.grad.tolist(),
    }


if __name__ == "__main__":
    main()
