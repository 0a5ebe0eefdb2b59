"""Rules across keys and sections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from retrograd.config import (
    CONDITIONAL_KEYS,
    SHARED_SECTIONS,
    Document,
    OutputConfig,
    RunSection,
    RunShape,
    check_rules,
    keys_of,
    read_shared,
    table_name,
)
from retrograd_hookspecs import Component, ConfigError

from .components import ADAMW, FULL, GRPO, LORA, SFT, SFT_RUN, SGD, read_run

Parse = Callable[[str], Document]
GRPO_RUN = (("algorithms", GRPO), ("trainables", LORA), ("optimizers", ADAMW))
FULL_RUN = (("algorithms", SFT), ("trainables", FULL), ("optimizers", ADAMW))

BASE = """\
[run]
algorithm = "sft"
[model]
path = "m.gguf"
[output]
path = "o.gguf"
[lora]
[sft]
data = "d.jsonl"
"""
GRPO_BASE = BASE.replace('"sft"', '"grpo"').replace(
    '[sft]\ndata = "d.jsonl"\n',
    "[grpo]\nprompts = 'p'\n[grpo.sampling]\ntemperature = 1.0\ntop_p = 1.0\nmax_new_tokens = 8\n",
)


def problems(
    parse: Parse, text: str, components: tuple[tuple[str, Component[Any, Any]], ...] = SFT_RUN
) -> list[str]:
    try:
        read_run(parse(text), components)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_a_valid_run(parse: Parse) -> None:
    config, configs = read_run(parse(BASE + "[training]\nctx = 256\ngradient_accumulation = 8\n"))
    assert (config.training.ctx, config.training.micro_batch) == (256, 32)
    assert config.evaluation is None
    assert config.metrics.sinks == ()
    assert config.model.path.endswith("/m.gguf")
    assert list(config.tables) == ["lora", "sft"]
    assert configs["trainables"].rank == 8


def test_a_rollout_run_fixes_accumulation(parse: Parse) -> None:
    config, _ = read_run(parse(GRPO_BASE + "[training]\nctx = 96\n"), GRPO_RUN)
    assert config.training.gradient_accumulation == 3


# Sections that a test appends start at line 10 of the file.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[training]\ngradient_accumulation = 3\nmicro_batch = 32\n",
            "run.toml:12: training.micro_batch: micro_batch × gradient_accumulation = 32 × 3 = 96 does not"
            " divide ctx = 128 (line 11) (the product may be 64 or 128)",
        ),
        (
            "[training]\nctx = 100\n",
            "run.toml:11: training.ctx: micro_batch × gradient_accumulation = 32 × 1 = 32 does not divide"
            " ctx = 100 (micro_batch may be 25 or 50)",
        ),
        (
            f"[training]\nctx = {10**18 + 1}\n",
            "run.toml:11: training.ctx: micro_batch × gradient_accumulation = 32 × 1 = 32 does not divide"
            f" ctx = {10**18 + 1} (micro_batch may be any divisor of {10**18 + 1})",
        ),
        (
            "[checkpoint]\ndirectory = 'c'\nmode = 'best_eval'\n",
            'run.toml:12: checkpoint.mode: "best_eval" needs a section [evaluation], and there is none (add'
            ' [evaluation], or set mode = "steps")',
        ),
        (
            "[checkpoint]\ndirectory = 'c'\nmode = 'steps'\n",
            'run.toml:10: checkpoint.every_steps: required with mode = "steps" (line 12) (the number of'
            " optimizer steps between checkpoints)",
        ),
        (
            "[checkpoint]\ndirectory = 'c'\nmode = 'best_eval'\nevery_steps = 5\n[evaluation]\ndata = 'e'\n",
            'run.toml:13: checkpoint.every_steps: 5 has no effect with mode = "best_eval" (line 12) (leave it'
            ' out, or set mode = "steps_and_best_eval")',
        ),
        (
            "[training]\ncheckpoint_dtype = 'bf16'\n",
            'run.toml:11: training.checkpoint_dtype: "bf16" has no effect without gradient_checkpointing (set'
            " gradient_checkpointing = true, or leave checkpoint_dtype out)",
        ),
        (
            "[training]\nchunked_cross_entropy = false\nchunked_ce_tiles = 4\n",
            "run.toml:12: training.chunked_ce_tiles: 4 has no effect without chunked_cross_entropy (line 11)"
            " (set chunked_cross_entropy = true, or leave chunked_ce_tiles out)",
        ),
        (
            "[grpo]\nprompts = 'p'\n",
            'run.toml:10: [grpo]: this section does not apply: it is read if run.algorithm is "grpo", not'
            ' "sft" (line 2) (a run has exactly one algorithm section)',
        ),
        (
            "[trainable]\nlayers = 'all'\n",
            'run.toml:10: [trainable]: this section does not apply with training.trainable = "lora"'
            " (remove it)",
        ),
        (
            "[observe]\ndirectory = 'o'\n",
            'run.toml:10: [observe]: this section does not apply: the algorithm "sft" (line 2) does not'
            " read it (remove it)",
        ),
        (
            "[reference]\nmodel = 'r'\n",
            'run.toml:10: [reference]: this section does not apply: the algorithm "sft" (line 2) does not'
            " read it (remove it)",
        ),
        (
            "[optimizer.sgd]\nmomentum = 0.9\n",
            'run.toml:10: [optimizer.sgd]: this section does not apply: training.optimizer selects "adamw"'
            " (remove it)",
        ),
        (
            "[optimizer.adam]\n",
            'run.toml:10: [optimizer.adam]: this section does not apply: training.optimizer selects "adamw"'
            " (did you mean adamw?)",
        ),
        (
            "[optimizer]\nmomentum = 0.9\n",
            "run.toml:11: optimizer.momentum: expected a table [optimizer.NAME] with the options of one"
            " optimizer (did you mean [optimizer.adamw]?)",
        ),
        (
            "[trainig]\nlr = 1\n",
            "run.toml:10: [trainig]: unknown section: nothing in this run reads it (did you mean training?)",
        ),
        (
            "[training]\ngeneration_batch = 8\n",
            'run.toml:11: training.generation_batch: 8 has no effect in this run ("sft"): rollout algorithms'
            " read it (leave it out)",
        ),
        (
            "[evaluation]\ndata = 'e'\nmax_examples = 4\n",
            'run.toml:12: evaluation.max_examples: 4 has no effect in this run ("sft"): rollout algorithms'
            " read it (leave it out)",
        ),
        (
            "[training]\nrank = 4\ndevice = 'cpu'\n",
            "run.toml:12: training.device: unknown key (it is a key of [model])",
        ),
    ],
)
def test_refusals(parse: Parse, text: str, expected: str) -> None:
    assert expected in problems(parse, BASE + text)


def test_the_kind_of_output(parse: Parse) -> None:
    text = BASE.replace('"o.gguf"', '"o.gguf"\nkind = "model"')
    assert problems(parse, text) == [
        'run.toml:7: output.kind: "model" cannot be written with training.trainable = "lora", only "adapter"'
        ' ("model" needs trainable = "full")'
    ]
    full = text.replace("[lora]\n", "[training]\ntrainable = 'full'\n")
    assert problems(parse, full, FULL_RUN) == []
    assert problems(parse, full.replace('"model"', '"adapter"'), FULL_RUN) == [
        'run.toml:7: output.kind: "adapter" cannot be written with training.trainable = "full" (line 9), only'
        ' "trainable" or "model" ("adapter" needs trainable = "lora")'
    ]


def test_fixed_accumulation(parse: Parse) -> None:
    text = GRPO_BASE + "[training]\nctx = 128\nmicro_batch = 32\ngradient_accumulation = 2\n"
    assert problems(parse, text, GRPO_RUN) == [
        "run.toml:17: training.gradient_accumulation: grpo fixes it to ctx / micro_batch = 128 / 32 = 4"
        " (line 15, line 16), got 2 (leave it out)"
    ]
    assert problems(parse, text.replace("lation = 2", "lation = 4"), GRPO_RUN) == []
    assert problems(parse, GRPO_BASE + "[training]\nmicro_batch = 48\n", GRPO_RUN) == [
        "run.toml:15: training.micro_batch: micro_batch = 48 does not divide ctx = 128: 128 / 48 = 2.667"
        " (micro_batch may be 32 or 64)"
    ]


def test_the_reference_holds_the_context(parse: Parse) -> None:
    text = GRPO_BASE + "[reference]\nmodel = 'r'\nctx = 64\n"
    assert problems(parse, text, GRPO_RUN) == [
        "run.toml:16: reference.ctx: must be at least training.ctx = 128, got 64"
    ]


def test_required_sections(parse: Parse) -> None:
    assert problems(parse, "[run]\nalgorithm = 'sft'\n") == [
        "run.toml: [model]: this section is missing (required key: path)",
        "run.toml: [output]: this section is missing (required key: path)",
        'run.toml: [lora]: this section is missing: training.trainable is "lora" (an empty [lora] takes the'
        " defaults)",
        "run.toml: [sft]: this section is missing (required key: data)",
    ]


def test_a_key_outside_any_section(parse: Parse) -> None:
    assert problems(parse, "algorithm = 'sft'\n" + BASE)[0] == (
        "run.toml:1: algorithm: unknown key outside any section (did you mean run.algorithm?)"
    )


def test_init_adapter(parse: Parse) -> None:
    text = BASE.replace("[lora]\n", "[lora]\ninit_adapter = 'a.gguf'\nrank = 4\n")
    assert problems(parse, text) == [
        "run.toml:9: lora.rank: cannot be given together with init_adapter (run.toml:8) (leave out rank or"
        " init_adapter)"
    ]
    resumed = text.replace("rank = 4\n", "") + (
        "[checkpoint]\ndirectory = 'c'\nmode = 'steps'\nevery_steps = 1\nresume_from = 'c/step-1.state'\n"
    )
    assert problems(parse, resumed) == [
        "run.toml:8: lora.init_adapter: cannot be combined with a resume (run.toml:15): the checkpoint holds"
        " the weights (leave init_adapter out, and give the other keys as they are in the checkpoint)"
    ]


def test_rules_are_silent_about_what_is_refused_already(parse: Parse) -> None:
    shown = problems(parse, BASE + "[training]\nctx = '100'\n[checkpoint]\nmode = 'best'\ndirectory = 'c'\n")
    assert [line.split(": ")[1] for line in shown] == ["training.ctx", "checkpoint.mode"]


def test_problems_of_overrides_come_last(parse: Parse) -> None:
    document = parse(BASE + "[training]\nctx = 100\nmicro_batch = 50\n").with_set("training.micro_batch=32")
    with pytest.raises(ConfigError) as caught:
        read_run(document.with_value("model.device", 3, where="--device"))
    assert [problem.where for problem in caught.value.problems] == [
        "--device",
        "--set training.micro_batch",
    ]


def test_an_unknown_algorithm_makes_no_section_stray(parse: Parse) -> None:
    shared = read_shared(parse(BASE + "[mine]\nx = 1\n[trainig]\n[training]\ngeneration_batch = 1\n"))
    shown = [str(problem) for problem in check_rules(shared, RunShape.of([("optimizers", ADAMW)]))]
    assert shown == [
        "run.toml:12: [trainig]: unknown section: nothing in this run reads it (did you mean training?)"
    ]


def test_commands_that_train_nothing_need_fewer_sections(parse: Parse) -> None:
    document = Document.from_values({"model": {"path": "/m.gguf"}}, name="command line")
    absent = {"run": RunSection(algorithm=""), "output": OutputConfig(path=Path("/unused"))}
    shared = read_shared(document, absent=absent)
    assert check_rules(shared, RunShape.of([("trainables", LORA)])) == []
    assert shared.config().run.algorithm == ""
    assert shared.value("output.kind") is None
    text = "[model]\npath = 'm'\n[output]\nkind = 'adaptor'\n"
    keys = [problem.key for problem in read_shared(parse(text), absent=absent).problems]
    assert keys == ["output.kind", "output.path"]


def test_tables_of_components() -> None:
    assert table_name("algorithms", SFT) == "sft"
    assert table_name("algorithms", attrs.evolve(SFT, section="agent")) == "agent"
    assert table_name("trainables", FULL) is None
    assert table_name("optimizers", SGD) == "optimizer.sgd"
    assert table_name("hooks", FULL) == "plugin.full"
    assert table_name("kernels", SGD) is None


def test_conditional_keys_exist() -> None:
    for key in CONDITIONAL_KEYS:
        section, name = key.split(".")
        assert name in {k.name for k in keys_of(SHARED_SECTIONS[section])}


def test_keys_that_the_run_reads_may_be_set(parse: Parse) -> None:
    text = BASE + "[training]\nepochs = 2\nchunked_ce_tiles = 4\ngradient_checkpointing = true\n"
    assert problems(parse, text + "checkpoint_dtype = 'bf16'\ncheckpoint_every_n_layers = 2\n") == []


def test_a_command_that_trains_nothing_leaves_tables_of_training_alone(parse: Parse) -> None:
    """`chat` reads the run's file, whose optimizer and sinks it does not select."""
    tables = (
        "[optimizer.adamw]\nbeta2 = 0.9\n[lr_scheduler.x]\n[loss.focal]\ngamma = 2\n[sink.csv]\npath = 'm'\n"
    )
    shared = read_shared(parse(BASE + tables))
    assert check_rules(shared, RunShape.of([("trainables", LORA)])) == []
    stray = check_rules(shared, RunShape.of([("algorithms", SFT), ("trainables", LORA)]))
    assert len(stray) >= 4
