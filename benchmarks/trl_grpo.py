"""GRPO updates with TRL on the CPU: one prompt, several answers of fixed length; prints one JSON line.

The reward is a count of distinct words: it costs nothing and differs between answers. TRL's defaults are
kept but for what the case fixes; answers are forced to their full length.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.measure import PeakMemory, emit
from benchmarks.torch_sft import TARGETS
from datasets import Dataset

PROMPTS = [f"What is {a} + {a + 7}? Think step by step, then give the answer." for a in range(12, 76)]


class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Seconds of every update, generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def distinct_words(completions: list[Any], **_columns: Any) -> list[float]:
    """A reward in 0 to about 1 for each answer."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [len(set(text.split())) / 64 for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    for name in ("answers", "tokens", "rank", "threads", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    a = parser.parse_args()

    memory = PeakMemory()
    torch.set_num_threads(a.threads)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype))
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(
                output_dir=directory,
                per_device_train_batch_size=a.answers,
                num_generations=a.answers,
                max_completion_length=a.tokens,
                generation_kwargs={"min_new_tokens": a.tokens},
                max_steps=a.warmup + a.steps,
                use_cpu=True,
                bf16=False,
                fp16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
            ),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": p}]} for p in PROMPTS]),
            processing_class=AutoTokenizer.from_pretrained(a.model),
            reward_funcs=distinct_words,
            callbacks=[clock],
            peft_config=LoraConfig(
                r=a.rank, lora_alpha=2 * a.rank, target_modules=TARGETS, task_type="CAUSAL_LM"
            ),
        )
        memory.reset()
        trainer.train()
    emit(
        seconds=clock.seconds[a.warmup :],
        work=a.answers * a.tokens,
        memory=memory,
        versions=("torch", "transformers", "peft", "trl"),
    )


if __name__ == "__main__":
    main()
