"""One LoRA SFT step of retrograd on random tokens, optimizer included; prints one JSON line."""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.measure import PeakMemory, emit, time_steps
from benchmarks.retrograd_parts import VERSIONS, assembled
from retrograd.engine import TrainingSequence, plan_epoch
from retrograd.update import Updater


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("batch", "length", "rank", "threads", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--kernels", default="auto")
    a = parser.parse_args()

    memory = PeakMemory()
    tokens = a.batch * a.length
    with assembled(a.model, tokens=tokens, threads=a.threads, rank=a.rank, kernels=a.kernels) as assembly:
        services = assembly.services
        services.provide("total_steps", None)
        engine, trainable = services.get("engine"), services.get("trainable")
        loss = assembly.build("losses", "cross_entropy")
        update = Updater(
            trainable=trainable,
            optimizer=services.get("optimizer"),
            schedule=services.get("schedule"),
            kernels=services.get("kernels"),
            max_grad_norm=assembly.config.training.max_grad_norm,
        )
        vocabulary = services.get("architecture").vocabulary_size
        rng = np.random.default_rng(0)
        losses: list[float] = []
        memory.reset()

        def step() -> None:
            sequences = [_random_sequence(rng, a.length, vocabulary) for _ in range(a.batch)]
            predicts = [sequence.predicts for sequence in sequences]
            [plan] = plan_epoch(predicts, range(a.batch), micro_batch=tokens, gradient_accumulation=1)
            stats = engine.train_step(plan, sequences, loss, float(tokens))
            update(len(losses) + 1)
            losses.append(stats.loss)

        seconds = time_steps(step, warmup=a.warmup, steps=a.steps)
    emit(
        seconds=seconds,
        work=tokens,
        memory=memory,
        versions=VERSIONS,
        trained_parameters=sum(parameter.value.size for parameter in trainable.parameters),
        losses=losses,
    )


def _random_sequence(rng: np.random.Generator, length: int, vocabulary: int) -> TrainingSequence:
    """`length` inputs, each of which predicts a trained token: one target more than PyTorch has."""
    tokens = rng.integers(0, vocabulary, length + 1).astype(np.int32)
    trained = np.ones(length + 1, np.bool_)
    trained[0] = False
    return TrainingSequence(tokens=tokens, trained=trained)


if __name__ == "__main__":
    main()
