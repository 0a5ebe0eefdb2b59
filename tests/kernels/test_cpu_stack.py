"""`decode_blocks`: in one call what the modules compute one by one; rows that do not depend on each other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from retrograd.gguf import open_model
from retrograd.kernel_table import FrozenKernelTable
from retrograd.nn import CausalLM, KeyValueStore, LoraFactors, Run, build_pass
from retrograd_hookspecs import ONE_BY_ONE, OPS, BuildContext, KernelError, KernelImpl, Parameter
from retrograd_plugins.kernels.cpu import _stack_layout as at
from retrograd_plugins.kernels.cpu._rows import ROWS_FORMATS
from retrograd_plugins.kernels.cpu._simd_features import jit_disabled
from retrograd_plugins.kernels.cpu._stack import _attention_tasks
from retrograd_plugins.tokenizers import gpt2
from tests.model_support import architecture, build_backend, build_kernels, load_model

needs_jit = pytest.mark.skipif(jit_disabled(), reason="about compiled code; the JIT is switched off")
CONTEXTS = (5, 1, 40, 23, 16)
ROOM = 64
FLOAT32: Mapping[str, str] = dict.fromkeys(OPS, "avx512") | {"attention": "numba"}
"""Variants that round nothing, of the ops that have one."""


def make(
    path: Path, *, rank: int = 0, variants: Mapping[str, str] | str = "", table: Any = None, **changes: Any
) -> CausalLM:
    """A model on the cpu; `changes` replace entries of its description."""
    backend = build_backend("cpu")
    file = open_model(path)
    spec = attrs.evolve(architecture(file.architecture).describe(file), **changes)
    model = CausalLM(file, spec, table or build_kernels(backend, variants), backend)
    rng = np.random.default_rng(7)
    if rank:
        for name, projection in model.projections.items():
            rows, columns = projection.weight.shape
            factors = [
                rng.standard_normal((rank, columns)) / columns**0.5,
                rng.standard_normal((rows, rank)) * 0.2,
            ]
            a, b = (
                Parameter(name=name, value=one, grad=None, weight=one)
                for one in (factor.astype(np.float32) for factor in factors)
            )
            projection.lora = LoraFactors(a=a, b=b, scale=1.5)
    return model


class Decoding:
    """Sequences of CONTEXTS tokens in a cache, and passes that go on with some of them."""

    def __init__(self, model: CausalLM, dtype: Any = None) -> None:
        self.model = model
        cache = model.new_cache("test", dtype)
        cache.reserve(len(CONTEXTS) * ROOM, 8)
        self.store = KeyValueStore(cache=cache)
        self.rng = np.random.default_rng(11)
        self.forward([self.run(i, count, 0) for i, count in enumerate(CONTEXTS)], few=False)

    def run(self, sequence: int, count: int = 1, start: int | None = None) -> Run:
        tokens = self.rng.integers(0, self.model.spec.vocabulary_size, count).astype(np.int32)
        first = CONTEXTS[sequence] if start is None else start
        return Run(tokens=tokens, start=first, row=sequence * ROOM)

    def forward(self, runs: Sequence[Run], *, few: bool) -> Any:
        batch = build_pass(runs, self.model.backend, cache_rows=self.store.cache.rows)
        if not few:
            return self.model.forward(batch, self.store).copy()
        with self.model.few_rows():
            return self.model.forward(batch, self.store).copy()

    def logits(self, hidden: Any) -> Any:
        out = np.empty((len(hidden), self.model.spec.vocabulary_size), np.float32)
        self.model.head.logits(hidden, out)
        return out


def gap(found: Any, expected: Any) -> float:
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


def was_fused(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the passes that the op served from now on."""
    served: list[int] = []
    original = model._fused.forward

    def forward(x: Any, *rest: Any) -> bool:
        done = original(x, *rest)
        served.extend([len(x)] if done else [])
        return done

    monkeypatch.setattr(model._fused, "forward", forward)
    return served


MODELS: Sequence[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"architecture": "llama"}, {}),
    ({"architecture": "llama", "rope_factors": True}, {"attention_softcap": 3.0}),
    ({"architecture": "llama"}, {"rope_dimensions": 8, "rope_interleaved": False, "attention_scale": 0.5}),
    ({"architecture": "qwen2"}, {}),
    ({"architecture": "qwen3"}, {}),
    ({"architecture": "gemma3"}, {}),
    (
        {"architecture": "llama", "head_count": 3, "head_count_kv": 1, "embedding_length": 96},
        {"activation": "gelu_tanh"},
    ),
]


@needs_jit
@pytest.mark.parametrize("rank", [0, 5, 8])
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_float_weights_give_what_the_modules_give(
    number: int, rank: int, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every architecture: without rounding only the order of sums differs."""
    options, changes = MODELS[number]
    model = make(tiny_model(**options), rank=rank, variants=FLOAT32, **changes)
    decoding = Decoding(model)
    served = was_fused(model, monkeypatch)
    for runs in (
        [decoding.run(i) for i in range(5)],
        [decoding.run(2)],
        [decoding.run(0, 3), decoding.run(3), decoding.run(1, 17)],
    ):
        exact = decoding.forward(runs, few=False)
        found = decoding.forward(runs, few=True)
        assert gap(found, exact) < 3e-5
        # What it wrote to the cache is what the next pass reads.
        again = [Run(tokens=run.tokens[-1:], start=run.start + len(run.tokens), row=run.row) for run in runs]
        after = decoding.forward(again, few=False)
        decoding.forward(runs, few=False)
        assert gap(after, decoding.forward(again, few=False)) < 3e-5
    assert served == [5, 1, 21]


@needs_jit
@pytest.mark.parametrize("architecture_name", ["llama", "gemma3"])
@pytest.mark.parametrize("name", sorted(ROWS_FORMATS))
def test_every_format_is_near_the_exact_path(
    name: str, architecture_name: str, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(
        architecture=architecture_name,
        format=name,
        formats={"*ffn_down*": "Q8_0", "*attn_v*": "Q6_K", "token_embd*": "Q8_0"},
        embedding_length=256,
        feed_forward_length=256,
        head_count=4,
        head_length=64,
        block_count=2,
    )
    model = make(path, rank=8)
    decoding = Decoding(model, np.float16)
    served = was_fused(model, monkeypatch)
    runs = [decoding.run(i) for i in range(5)]
    assert gap(decoding.forward(runs, few=True), decoding.forward(runs, few=False)) < 6e-2
    assert served == [5]


@needs_jit
@pytest.mark.parametrize("dtype", [None, np.float16])
@pytest.mark.parametrize("name", ["F16", "Q4_1"])
def test_a_row_depends_on_itself_alone(name: str, dtype: Any, tiny_model: Callable[..., Path]) -> None:
    """Alone, among others, elsewhere in the pass, and with more than fit the first tables: the same bits."""
    model = make(tiny_model(architecture="gemma3", format=name), rank=8)
    decoding = Decoding(model, dtype)
    runs = [decoding.run(i) for i in range(5)]
    together = decoding.forward(runs, few=True)
    for order in ([3], [4, 0], [2, 4, 1, 0, 3]):
        assert np.array_equal(decoding.forward([runs[i] for i in order], few=True), together[order])
    longer = [*runs, *[decoding.run(i, 8, CONTEXTS[i] + 1) for i in range(5)]]
    assert np.array_equal(decoding.forward(longer, few=True)[:5], together)


@needs_jit
def test_a_run_cut_in_two_has_the_bits_of_the_whole(tiny_model: Callable[..., Path]) -> None:
    model = make(tiny_model(architecture="gemma3", format="Q8_0"))
    decoding = Decoding(model)
    whole = decoding.run(2, 12)
    expected = decoding.forward([whole], few=True)
    first = attrs.evolve(whole, tokens=whole.tokens[:5])
    second = attrs.evolve(whole, tokens=whole.tokens[5:], start=whole.start + 5)
    found = [decoding.forward([part], few=True) for part in (first, second)]
    assert np.array_equal(np.concatenate(found), expected)


@needs_jit
def test_a_shared_beginning_is_read_where_it_lies(tiny_model: Callable[..., Path]) -> None:
    """Own keys far from the context: the bits that they have right behind it."""
    model = make(tiny_model(architecture="llama", format="Q8_0"))
    decoding = Decoding(model)
    batch = build_pass([decoding.run(2, 12)], model.backend, cache_rows=decoding.store.cache.rows)
    with model.few_rows():
        expected = model.forward(batch, decoding.store).copy()
        moved = np.array([[0, 12, 2 * ROOM, CONTEXTS[2], 4 * ROOM + 30]])
        found = model.forward(attrs.evolve(batch, shared_segments=moved), decoding.store)
        assert np.array_equal(found, expected)


@needs_jit
@pytest.mark.parametrize("dtype", [None, np.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_sequences_that_share_a_beginning_have_the_bits_of_each_alone(
    name: str, dtype: Any, tiny_model: Callable[..., Path]
) -> None:
    """Four read 29 tokens of the third's place, which are overwritten in their own; a fifth shares nothing.
    With a window, gemma3 sees them in part, each from another position on."""
    model = make(tiny_model(architecture=name, format="Q8_0"), rank=8)
    decoding = Decoding(model, dtype)
    cache = decoding.store.cache
    for sequence in (0, 1, 3):
        cache.copy_rows(2 * ROOM, sequence * ROOM, 29)
    starts = {0: 37, 1: 29, 2: 40, 3: 56}
    for sequence, start in starts.items():
        if start > 29 and sequence != 2:
            decoding.forward([decoding.run(sequence, start - 29, 29)], few=True)
    runs = [decoding.run(sequence, 1, start) for sequence, start in starts.items()]
    runs.append(decoding.run(4))
    alone = np.concatenate([decoding.forward([run], few=True) for run in runs])
    for sequence in (0, 1, 3):
        cache.copy_rows(4 * ROOM + 40, sequence * ROOM, 20)
    for shared in (29, 17):
        # What follows the shared part is each one's own, so it has to be there.
        for sequence in (0, 1, 3):
            cache.copy_rows(2 * ROOM + shared, sequence * ROOM + shared, 29 - shared)
        together = [attrs.evolve(run, shared=(2 * ROOM, shared)) for run in runs[:4]] + runs[4:]
        assert np.array_equal(decoding.forward(together, few=True), alone)


@needs_jit
def test_a_new_cache_does_not_meet_the_arrays_of_the_last(tiny_model: Callable[..., Path]) -> None:
    """Both together would be the peak of a run."""
    model = make(tiny_model(architecture="llama", format="Q8_0"))
    decoding = Decoding(model, np.float16)
    decoding.forward([decoding.run(0)], few=True)
    last = weakref.ref(decoding.store.cache.stored[0][0])
    assert last() is not None
    del decoding
    model.new_cache("test", np.float16).reserve(2 * len(CONTEXTS) * ROOM, 0)
    gc.collect()
    assert last() is None


def test_tasks_of_attention_hold_every_token_once() -> None:
    spans = np.zeros((7, at.SPAN_WORDS), np.int64)
    spans[:, at.CONTEXT_START] = [64, 0, 64, 64, 64, 128, 64]
    spans[:, at.CONTEXT_LENGTH] = [30, 20, 30, 30, 30, 5, 31]
    order, tasks = _attention_tasks(spans, 4, 2, 1)
    found = [sorted(order[first : first + count].tolist()) for first, count, *_ in tasks.tolist()]
    assert found == [[1], [0, 2, 3], [4], [6], [5]]
    assert (tasks[:, at.TASK_HEAD_STOP] == 4).all()
    _, tasks = _attention_tasks(spans[:2], 4, 2, 4)
    assert tasks.tolist() == [[token, 1, head, head + 2] for token in range(2) for head in (0, 2)]
    _, tasks = _attention_tasks(spans[:2], 4, 2, 5)
    assert tasks.tolist() == [[token, 1, head, head + 1] for token in range(2) for head in range(4)]


@needs_jit
@pytest.mark.parametrize(
    "segment",
    [[0, 2, 0, 5, 5], [0, 1, 0, 5, 6 * ROOM], [0, 1, 6 * ROOM, 5, 5], [0, 1, 0, 6, 5]],
    ids=["length", "own", "context", "position"],
)
def test_segments_that_do_not_fit_are_refused(segment: list[int], tiny_model: Callable[..., Path]) -> None:
    model = make(tiny_model(architecture="llama", format="Q8_0"))
    decoding = Decoding(model)
    batch = build_pass([decoding.run(0)], model.backend, cache_rows=decoding.store.cache.rows)
    with model.few_rows(), pytest.raises(KernelError, match="decode_blocks: segments"):
        model.forward(attrs.evolve(batch, shared_segments=np.array([segment])), decoding.store)


@needs_jit
def test_adapters_and_caches_may_come_and_go(tiny_model: Callable[..., Path]) -> None:
    model = make(tiny_model(architecture="llama"), rank=8, variants="avx512")
    for decoding in (Decoding(model), Decoding(model, np.float16)):
        runs = [decoding.run(i) for i in range(3)]
        with_adapter = decoding.forward(runs, few=True)
        assert gap(with_adapter, decoding.forward(runs, few=False)) < 2e-3
        with model.without_adapter():
            assert gap(decoding.forward(runs, few=True), decoding.forward(runs, few=False)) < 2e-3
            assert gap(decoding.forward(runs, few=True), with_adapter) > 1e-2
        first = next(iter(model.projections.values()))
        assert first.lora is not None
        first.lora.b.weight[...] *= 2.0  # trained in place
        assert gap(decoding.forward(runs, few=True), decoding.forward(runs, few=False)) < 2e-3
        assert gap(decoding.forward(runs, few=True), with_adapter) > 1e-4


@needs_jit
def test_a_pass_with_other_runs_takes_the_ordinary_way(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tiny_model(architecture="llama", format="Q8_0"))
    decoding = Decoding(model)
    served = was_fused(model, monkeypatch)
    loose = Run(tokens=np.array([1, 2, 3], np.int32))
    runs = [decoding.run(0), loose]
    assert gap(decoding.forward(runs, few=True), decoding.forward(runs, few=False)) < 5e-2
    assert not served


@needs_jit
@pytest.mark.parametrize(
    "options",
    [{"head_length": 24, "embedding_length": 96}, {"head_count": 4, "head_count_kv": 1, "head_length": 8}],
)
def test_shapes_that_the_op_does_not_serve(
    options: dict[str, Any], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tiny_model(architecture="llama", format="Q8_0", **options))
    decoding = Decoding(model)
    served = was_fused(model, monkeypatch)
    runs = [decoding.run(i) for i in range(3)]
    assert gap(decoding.forward(runs, few=True), decoding.forward(runs, few=False)) < 5e-2
    assert not served


@needs_jit
def test_who_replaces_a_part_is_not_passed_over(tiny_model: Callable[..., Path]) -> None:
    backend = build_backend("cpu")
    table = build_kernels(backend)
    assert table.serving("decode_blocks", "Q8_0").fn == table.serving("decode_blocks", "Q4_K").fn
    mine = KernelImpl(op="rms_norm", fn=table.get("rms_norm"), priority=1000, variant="mine")
    everything = [impl for found in table._candidates.values() for impl in found]
    replaced = FrozenKernelTable([*everything, mine], backend.device)
    assert replaced.serving("decode_blocks", "Q8_0").variant == ONE_BY_ONE
    model = make(tiny_model(architecture="llama", format="Q8_0"), table=replaced)
    assert model._fused._decode is None


def test_without_a_kernel_the_modules_do_the_work(tiny_model: Callable[..., Path]) -> None:
    backend = build_backend("reference")
    model = load_model(tiny_model(architecture="llama"), backend, build_kernels(backend))
    decoding = Decoding(model)
    runs = [decoding.run(i) for i in range(2)]
    assert np.array_equal(decoding.forward(runs, few=True), decoding.forward(runs, few=False))


TEXT = (
    "The history of the city begins with a small village on the river. Merchants from the north built the"
    " first bridge, and soon there was a market, a mill and a church. In the following century the walls were"
    " raised twice, because the town had grown beyond them."
)


@needs_jit
@pytest.mark.parametrize("dtype", [None, np.float16])
def test_log_probabilities_of_a_text_are_near_those_of_training(dtype: Any, smollm2_path: Path) -> None:
    """SmolLM2, 16 tokens a pass: mean |gap| 0.05 nats, as with `matmul_few`."""
    model = make(smollm2_path)
    tokens = np.asarray(_encode(model, TEXT), np.int32)
    cache = model.new_cache("text", dtype)
    cache.reserve(128, 0)
    store = KeyValueStore(cache=cache)

    def evaluated(*, few: bool) -> Any:
        rows = []
        for first in range(0, len(tokens), 16):
            run = Run(tokens=tokens[first : first + 16], start=first, row=0)
            batch = build_pass([run], model.backend, cache_rows=cache.rows)
            with model.few_rows() if few else nullcontext():
                hidden = model.forward(batch, store)
                logits = np.empty((len(hidden), model.spec.vocabulary_size), np.float32)
                model.head.logits(hidden, logits)
            rows.append(logits)
        return _log_probabilities(np.concatenate(rows)[:-1], tokens[1:])

    gaps = np.abs(evaluated(few=True) - evaluated(few=False))
    assert len(gaps) > 40
    assert gaps.mean() < 0.1
    assert gaps.max() < 0.6


def _log_probabilities(logits: Any, targets: Any) -> Any:
    z = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return z[np.arange(len(z)), targets] - np.log(np.exp(z).sum(axis=1))


def _encode(model: CausalLM, text: str) -> list[int]:
    [component] = gpt2.retrograd_tokenizers()
    context = BuildContext(config=None, base_dir=Path.cwd(), services={"model_file": model.file})
    return list(component.build(component.config(), context).encode(text))
