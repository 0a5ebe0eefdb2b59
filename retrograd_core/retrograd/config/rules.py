"""Rules across keys: what types and bounds of one key cannot tell.

A rule is a function of the shared sections and of what the selected components declare (`RunShape`)
that yields problems. A rule that asks for a value which the file gives wrongly is skipped: that
mistake is reported already, and guessing on would only add noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from retrograd_hookspecs import Problem

from .document import Document
from .keys import keys_of
from .messages import quote, show
from .run_config import SharedSections, UnknownValueError
from .section_rules import component_sections_apply, shared_sections_apply
from .sections import SHARED_SECTIONS
from .shape import RunShape

_ROLLOUT = "rollout algorithms"
_TILED = "algorithms whose loss is computed in tiles"
_GPU = "GPU backends"
CONDITIONAL_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "training.epochs": "sft and preference",
        "training.generation_concurrency": "grpo, agent_grpo and distill",
        "training.generation_batch": _ROLLOUT,
        "training.shared_prefix_fanout": "grpo and preference",
        "training.fast_sampling_context": _ROLLOUT,
        "training.kv_dtype": "backends and algorithms that keep keys and values in training",
        "training.chunked_cross_entropy": _TILED,
        "training.chunked_ce_tiles": _TILED,
        "training.chunked_ce_seq_chunk": _TILED,
        "training.master_weights": "trainables that train base weights",
        "training.require_gpu_resident": _GPU,
        "training.max_gpu_duty_cycle": _GPU,
        "evaluation.max_examples": _ROLLOUT,
    }
)
"""Shared keys that only some components read, and which. A component names those that it reads in
`Component.reads`. One that nothing in the run reads is refused unless it has its default, so that no
setting is silently without effect."""

_LARGEST_FACTORED = 10**9


def check_rules(shared: SharedSections, shape: RunShape) -> list[Problem]:
    """Problems of all rules."""
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems.extend(rule(shared, shape))
        except UnknownValueError:
            continue
    return problems


def micro_batches_divide_ctx(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """micro_batch × gradient_accumulation divides ctx; some algorithms fix the product to ctx."""
    ctx, micro_batch = shared.value("training.ctx"), shared.value("training.micro_batch")
    accumulation = shared.value("training.gradient_accumulation")
    keys = ("training.micro_batch", "training.gradient_accumulation", "training.ctx")
    key = next((key for key in keys if shared.given(key)), keys[0])
    places = shared.places(*(other for other in keys if other != key))
    if shape.fixed_accumulation:
        if ctx % micro_batch:
            yield shared.problem(
                key,
                f"micro_batch = {micro_batch} does not divide ctx = {ctx}: {ctx} / {micro_batch} ="
                f" {ctx / micro_batch:.4g}{places}",
                f"micro_batch may be {_nearest_divisors(ctx, micro_batch)}",
            )
        elif shared.given(keys[1]) and accumulation != ctx // micro_batch:
            yield shared.problem(
                keys[1],
                f"{shape.algorithm} fixes it to ctx / micro_batch = {ctx} / {micro_batch} ="
                f" {ctx // micro_batch}{shared.places(keys[2], keys[0])}, got {accumulation}",
                "leave it out",
            )
        return
    product = micro_batch * accumulation
    if ctx % product == 0:
        return
    if ctx % accumulation == 0:
        hint = f"micro_batch may be {_nearest_divisors(ctx // accumulation, micro_batch)}"
    else:
        hint = f"the product may be {_nearest_divisors(ctx, product)}"
    yield shared.problem(
        key,
        f"micro_batch × gradient_accumulation = {micro_batch} × {accumulation} = {product} does not divide"
        f" ctx = {ctx}{places}",
        hint,
    )


def best_eval_needs_evaluation(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """The best evaluation is only known with `[evaluation]`."""
    mode = shared.value("checkpoint.mode")
    if mode != "steps" and not shared.given("evaluation"):
        yield shared.problem(
            "checkpoint.mode",
            f"{quote(mode)} needs a section [evaluation], and there is none",
            'add [evaluation], or set mode = "steps"',
        )


def step_modes_need_every_steps(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """The modes that save by steps need every_steps; it has no effect in the other."""
    mode, every = shared.value("checkpoint.mode"), shared.value("checkpoint.every_steps")
    place = shared.places("checkpoint.mode")
    if mode != "best_eval" and every is None:
        yield shared.problem(
            "checkpoint.every_steps",
            f"required with mode = {quote(mode)}{place}",
            "the number of optimizer steps between checkpoints",
        )
    if mode == "best_eval" and every is not None:
        yield shared.problem(
            "checkpoint.every_steps",
            f'{every} has no effect with mode = "best_eval"{place}',
            'leave it out, or set mode = "steps_and_best_eval"',
        )


def details_need_their_switch(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """A detail of something that is switched off has no effect."""
    for switch, details in (
        ("gradient_checkpointing", ("checkpoint_dtype", "checkpoint_every_n_layers")),
        ("chunked_cross_entropy", ("chunked_ce_tiles", "chunked_ce_seq_chunk")),
    ):
        if shared.value(f"training.{switch}"):
            continue
        for name in details:
            key = f"training.{name}"
            if _differs_from_default(shared, key):
                yield shared.problem(
                    key,
                    f"{show(shared.value(key))} has no effect without"
                    f" {switch}{shared.places(f'training.{switch}')}",
                    f"set {switch} = true, or leave {name} out",
                )


def output_kind_fits_trainable(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """Which results a trainable that says so can write."""
    kind, allowed = shared.value("output.kind"), shape.output_kinds
    if kind is None or not allowed or kind in allowed:
        return
    fits = [quote(other.name) for other in shape.installed("trainables") if kind in other.output_kinds]
    yield shared.problem(
        "output.kind",
        f"{quote(kind)} cannot be written with training.trainable = {quote(shape.trainable)}"
        f"{shared.places('training.trainable')}, only {' or '.join(quote(k) for k in allowed)}",
        f"{quote(kind)} needs trainable = {' or '.join(fits)}" if fits else "leave it out",
    )


def a_start_excludes_a_resume(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """A checkpoint holds the weights: a run that is resumed starts from no other file."""
    resume = shared.value("checkpoint.resume_from")
    if resume is not None and shape.starts_from and shared.given(shape.starts_from):
        yield start_and_resume(shared.document, shape.starts_from, shared.where("checkpoint.resume_from"))


def start_and_resume(document: Document, key: str, resume: str) -> Problem:
    """The problem of a key that names a file to start from in a run that is resumed, as `resume` says."""
    name = key.partition(".")[2]
    return Problem(
        where=document.where(key),
        key=key,
        message=f"cannot be combined with a resume ({resume}): the checkpoint holds the weights",
        hint=f"leave {name} out, and give the other keys as they are in the checkpoint",
    )


def reference_holds_the_context(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """The reference model sees the same sequences as the policy."""
    reference, ctx = shared.value("reference.ctx"), shared.value("training.ctx")
    if reference is not None and reference < ctx:
        yield shared.problem(
            "reference.ctx",
            f"must be at least training.ctx = {ctx}{shared.places('training.ctx')}, got {reference}",
        )


def conditional_keys_are_read(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """A shared key that nothing in this run reads keeps its default."""
    if not shape.algorithm:
        return
    for key, readers in CONDITIONAL_KEYS.items():
        section = key.partition(".")[0]
        whole_section_refused = section == "evaluation" and section not in shape.applies
        if key in shape.reads or whole_section_refused:
            continue
        try:
            if _differs_from_default(shared, key):
                yield shared.problem(
                    key,
                    f"{show(shared.value(key))} has no effect in this run"
                    f" ({quote(shape.algorithm)}): {readers} read it",
                    "leave it out",
                )
        except UnknownValueError:
            continue


Rule = Callable[[SharedSections, RunShape], Iterable[Problem]]
RULES: tuple[Rule, ...] = (
    micro_batches_divide_ctx,
    best_eval_needs_evaluation,
    step_modes_need_every_steps,
    details_need_their_switch,
    output_kind_fits_trainable,
    a_start_excludes_a_resume,
    reference_holds_the_context,
    shared_sections_apply,
    component_sections_apply,
    conditional_keys_are_read,
)


def _differs_from_default(shared: SharedSections, key: str) -> bool:
    section, name = key.split(".")
    default = next(k.default for k in keys_of(SHARED_SECTIONS[section]) if k.name == name)
    return shared.given(key) and bool(shared.value(key) != default)


def _nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` on both sides of `wanted`: "32 or 64"."""
    if number > _LARGEST_FACTORED:
        return f"any divisor of {number}"
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d < wanted]
    above = [d for d in divisors if d > wanted]
    return " or ".join(str(d) for d in below[-1:] + above[:1])
