"""What is measured: one `Case` a workload and model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import attrs


@attrs.frozen(kw_only=True)
class Case:
    """One workload. `parameters` go to the contestant's script; `kind` says which script understands them."""

    name: str
    kind: str
    """"sft", "prompt", "generate", "grpo", "bandwidth", "gemm"."""
    unit: str
    title: str
    model: str = ""
    """A key of `benchmarks.models.LOCATORS`, or "" for the machine's limits."""
    parameters: Mapping[str, int | str] = attrs.field(factory=dict)
    higher_is_better: bool = True
    quick: bool = False
    """Part of `--quick`."""
    target: float | None = None
    """Wanted: retrograd's rate over that of the best peer."""
    memory_target: float | None = None
    """Wanted: retrograd's peak memory over that of the best peer, at most."""

    def number(self, parameter: str) -> int:
        """An integer parameter."""
        return int(self.parameters[parameter])


SFT_SHAPES = ((1, 512), (4, 512), (1, 2048))
SEQUENCES = (1, 8, 16)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
CONTEXT_CASE = "context/"
"""How the names of cases at growing context begin."""
LORA_RANK = 8


def all_cases() -> tuple[Case, ...]:
    """Every case, in the order in which a round runs them: the machine's limits first."""
    return (
        *_limits(),
        *(case for model in ("smollm2", "gemma3") for case in _model_cases(model)),
        *_context(),
    )


def select(cases: Iterable[Case], patterns: Sequence[str], *, quick: bool = False) -> tuple[Case, ...]:
    """Cases whose name matches any pattern (shell wildcards), or all; with `quick` only the quick ones.

    Raises ValueError for a pattern that matches no case.
    """
    known = tuple(cases)
    unmatched = [p for p in patterns if not any(fnmatchcase(case.name, p) for case in known)]
    if unmatched:
        raise ValueError(
            f"no case matches {', '.join(unmatched)}; --list shows their names ({known[0].name}, …)"
        )
    # Naming a case asks for it: --quick then only shortens it.
    return tuple(
        case
        for case in known
        if (any(fnmatchcase(case.name, p) for p in patterns) if patterns else case.quick or not quick)
    )


def _limits() -> tuple[Case, ...]:
    return (
        Case(
            name="limit/read-bandwidth",
            kind="bandwidth",
            unit="GB/s",
            title="Reading an array larger than the caches, all threads",
            quick=True,
        ),
        Case(
            name="limit/gemm-float32",
            kind="gemm",
            unit="GFLOP/s",
            title="float32 matrix product, 2048³",
            parameters={"dtype": "float32", "size": 2048},
            quick=True,
        ),
        Case(
            name="limit/gemm-bfloat16",
            kind="gemm",
            unit="GFLOP/s",
            title="bfloat16 matrix product, 2048³",
            parameters={"dtype": "bfloat16", "size": 2048},
            quick=True,
        ),
    )


def _model_cases(model: str) -> tuple[Case, ...]:
    sft = tuple(
        Case(
            name=f"sft/{model}/{batch}x{length}",
            kind="sft",
            unit="tok/s",
            title=f"LoRA SFT step, {batch}×{length} tokens",
            model=model,
            parameters={"batch": batch, "length": length, "rank": LORA_RANK},
            quick=(batch, length) == SFT_SHAPES[0],
            target=2.0,
            memory_target=1 / 3 if model == "smollm2" else None,
        )
        for batch, length in SFT_SHAPES
    )
    prompt = Case(
        name=f"prompt/{model}/512",
        kind="prompt",
        unit="tok/s",
        title="Prompt processing, 512 tokens",
        model=model,
        parameters={"prompt": 512},
        quick=True,
        target=1.0,
    )
    generation = tuple(
        Case(
            name=f"generate/{model}/{sequences}x128",
            kind="generate",
            unit="tok/s",
            title=f"Generation, {sequences} × 128 tokens after one 128-token prompt",
            model=model,
            parameters={"prompt": 128, "sequences": sequences, "tokens": 128},
            quick=True,
            target=1.0 if sequences == 1 else 3.0,
        )
        for sequences in SEQUENCES
    )
    grpo = Case(
        name=f"grpo/{model}/8x128",
        kind="grpo",
        unit="tok/s",
        title="GRPO update, 1 prompt × 8 answers × 128 tokens",
        model=model,
        parameters={"answers": 8, "tokens": 128, "rank": LORA_RANK},
        target=8.0,
    )
    return (*sft, prompt, *generation, *((grpo,) if model == "smollm2" else ()))


def _context() -> tuple[Case, ...]:
    """Generation at growing context: time a token should grow linearly, memory by the cache alone."""
    return tuple(
        Case(
            name=f"{CONTEXT_CASE}smollm2/{context}",
            kind="generate",
            unit="tok/s",
            title=f"Generation of one sequence at the end of {context} tokens of context",
            model="smollm2",
            parameters={"prompt": context - 32, "sequences": 1, "tokens": 32},
        )
        for context in CONTEXTS
    )
