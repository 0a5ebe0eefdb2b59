"""One LoRA SFT step with PyTorch and PEFT on random tokens; prints one JSON line.

Variants: "float32"; "autocast" (float32 weights, bf16 autocast); "bf16" (bf16 weights, adapters float32 as
PEFT makes them); "bf16-compiled" (the same under torch.compile).
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.measure import PeakMemory, emit, time_steps

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMPILED_WARMUP = 2
"""torch.compile compiles during the first step and may once more during the second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", required=True)
    for name in ("batch", "length", "rank", "threads", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    a = parser.parse_args()

    memory = PeakMemory()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if a.variant.startswith("bf16") else torch.float32
    base = AutoModelForCausalLM.from_pretrained(a.model, dtype=dtype)
    base.config.use_cache = False
    vocabulary = base.config.vocab_size
    lora = LoraConfig(r=a.rank, lora_alpha=2 * a.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    compiled = a.variant == "bf16-compiled"
    forward = torch.compile(model) if compiled else model
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    memory.reset()

    def step() -> None:
        ids = torch.randint(0, vocabulary, (a.batch, a.length), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=a.variant == "autocast"):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    warmup = max(a.warmup, COMPILED_WARMUP) if compiled else a.warmup
    seconds = time_steps(step, warmup=warmup, steps=a.steps)
    emit(
        seconds=seconds,
        work=a.batch * a.length,
        memory=memory,
        versions=("torch", "transformers", "peft"),
        trained_parameters=sum(parameter.numel() for parameter in trained),
        losses=losses,
    )


if __name__ == "__main__":
    main()
