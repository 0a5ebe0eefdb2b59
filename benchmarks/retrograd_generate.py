"""Prompt processing, or generation of several sequences that share a prompt; prints one JSON line.

Generation is timed from the moment when every sequence has its first token, so that the prompt is not part
of it. Sampling is that of reinforcement learning: temperature 1, log-probabilities kept. Decoding is that of
`training.fast_sampling_context`, which rounds what llama.cpp rounds: activations to 8 bits, the cache to
float16; `--exact` is decoding without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from benchmarks.measure import PeakMemory, emit, time_steps
from benchmarks.retrograd_parts import VERSIONS, assembled
from retrograd.engine import GenerationRequest, Generator
from retrograd_hookspecs import SamplingParams

PASS_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=0, help="0 times the prompt alone")
    parser.add_argument("--exact", action="store_true", help="decode with the kernels of training")
    for name in ("prompt", "threads", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    a = parser.parse_args()

    memory = PeakMemory()
    with assembled(a.model, tokens=PASS_TOKENS, threads=a.threads) as assembly:
        services = assembly.services
        generator = Generator(
            model=services.get("model"),
            sampler=services.get("sampler"),
            ctx=a.prompt + max(a.tokens, 1),
            slots=a.sequences,
            pass_tokens=PASS_TOKENS,
            fast=not a.exact,
            kv_dtype=None if a.exact else np.float16,
        )
        prompt = [1000 + index * 7919 % 40000 for index in range(a.prompt)]
        memory.reset()
        if a.tokens:
            _generation(generator, prompt, a.sequences, min(a.tokens, 8))  # warm-up
            seconds, produced = _median_sample(
                lambda: _generation(generator, prompt, a.sequences, a.tokens), a.steps
            )
            emit(seconds=seconds, work=produced, memory=memory, versions=VERSIONS)
        else:
            seconds = time_steps(
                lambda: generator.generate([_request(prompt, 1, 0)]), warmup=a.warmup, steps=a.steps
            )
            emit(seconds=seconds, work=a.prompt, memory=memory, versions=VERSIONS)


def _generation(generator: Generator, prompt: list[int], sequences: int, tokens: int) -> tuple[float, int]:
    """Seconds from the last sequence's first token to the end, and the tokens drawn in that time."""
    started: set[int] = set()
    ready = 0.0
    after = 0

    def on_token(number: int, token: int, logp: float) -> None:
        nonlocal ready, after
        if len(started) < sequences:
            started.add(number)
            ready = time.perf_counter()
        else:
            after += 1

    generator.generate([_request(prompt, tokens, stream) for stream in range(sequences)], on_token)
    if len(started) < sequences or not after:
        raise AssertionError(
            f"only {len(started)} of {sequences} sequences ran together; lengthen the answers"
        )
    return time.perf_counter() - ready, after


def _median_sample(sample: Callable[[], tuple[float, int]], count: int) -> tuple[list[float], int]:
    """Seconds of `count` samples, and the tokens of one: it is the same number in all."""
    results = [sample() for _ in range(count)]
    [tokens] = {tokens for _, tokens in results}
    return [seconds for seconds, _ in results], tokens


def _request(prompt: list[int], tokens: int, stream: int) -> GenerationRequest:
    """No stop tokens: every answer has the full length."""
    return GenerationRequest(
        prompt=prompt, params=SamplingParams(max_new_tokens=tokens), stop_ids=frozenset(), stream=stream
    )


if __name__ == "__main__":
    main()
