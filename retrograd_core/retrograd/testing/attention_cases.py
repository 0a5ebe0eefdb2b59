"""Attention in all its layouts: cases to compare with the oracle, and one text laid out in several ways.

The bitwise rule of attention is about layouts: a token has the same bits whether its sequence is alone,
packed among others, fed in chunks over a cache, or an answer that shares its prompt with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from retrograd_hookspecs import Backend

from .kernel_case import Array, KernelCase, Random, normal

PROMPT = 83
ANSWERS = (50, 1, 70)
CHUNKS = (1, 62, 2, 1, 64, 40)
"""Sizes of the chunks in which a sequence is fed; the last one takes what is left."""


def attention_cases(op: str, rng: Random) -> Iterator[KernelCase]:
    """Cases of `attention` and `attention_backward`."""
    one = [[0, 1, 0, 0, 0]]
    cached = [[0, 5, 3, 70, 73], [5, 1, 80, 0, 80], [6, 3, 3, 60, 90]]
    shared = [
        [0, 20, 0, 0, 0],
        [20, 70, 0, 20, 20],
        [90, 15, 0, 20, 90],
        [105, 5, 100, 4, 105],
        [110, 0, 0, 0, 0],
    ]
    layouts = (
        (one, 1, 1, 1, 1, 8, 0, 0.0),
        ([[0, 70, 0, 0, 0]], 70, 70, 4, 2, 64, 0, 0.0),
        ([[0, 130, 0, 0, 0]], 130, 130, 3, 3, 24, 20, 0.0),
        ([[0, 66, 0, 0, 0], [66, 1, 66, 0, 66]], 67, 70, 2, 1, 80, 1, 5.0),
        (cached, 9, 100, 6, 2, 32, 0, 3.0),
        (cached, 9, 100, 6, 2, 40, 7, 0.0),
        (shared, 110, 112, 6, 3, 48, 0, 0.0),
        (shared, 110, 112, 4, 1, 16, 11, 2.0),
        ([[4, 6, 0, 0, 2]], 12, 8, 2, 2, 16, 0, 0.0),
    )
    for segments, tokens, keys, heads, groups, size, window, softcap in layouts:
        q, dout = normal(rng, tokens, heads, size), normal(rng, tokens, heads, size)
        k, v = normal(rng, keys, groups, size), normal(rng, keys, groups, size)
        table = np.array(segments, np.int64)
        settings = {"segments": table, "scale": size**-0.5, "window": window, "softcap": softcap}
        label = f"{segments}, {heads} heads of {size}, {groups} key heads, {window=}, {softcap=}"
        if op == "attention":
            results = {"out": np.full_like(q, np.nan), "lse": np.full(q.shape[:2], np.nan, np.float32)}
            arguments = {"q": q, "k": k, "v": v} | settings | results
            yield KernelCase(op=op, label=label, arguments=arguments, outputs=("out", "lse"), tolerance=2e-6)
            continue
        out, lse = _attention_values(q, k, v, table, size**-0.5, window, softcap)
        inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        gradients = {
            "dq": np.full_like(q, np.nan),
            "dk": normal(rng, *k.shape),
            "dv": normal(rng, *v.shape),
        }
        yield KernelCase(
            op=op,
            label=label,
            arguments=inputs | settings | gradients,
            outputs=("dq", "dk", "dv"),
            tolerance=4e-6,
        )


def _attention_values(
    q: Array, k: Array, v: Array, segments: Array, scale: float, window: int, softcap: float
) -> tuple[Array, Array]:
    """What `attention` gives for the inputs of its gradient, by a mask over all keys of each segment."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    ratio = q.shape[1] // k.shape[1]
    for start, length, context_start, context, key_start in segments:
        rows = np.r_[context_start : context_start + context, key_start : key_start + length]
        keys, values = (np.repeat(x[rows].astype(np.float64), ratio, axis=1) for x in (k, v))
        scores = scale * np.einsum("thd,nhd->thn", q[start : start + length].astype(np.float64), keys)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        distance = context + np.arange(length)[:, None] - np.arange(len(rows))
        visible = (distance >= 0) & (distance < (window or len(rows) + 1))
        weights = np.where(visible[:, None, :], np.exp(scores), 0.0)
        total = weights.sum(axis=2)
        out[start : start + length] = np.einsum("thn,nhd->thd", weights / total[:, :, None], values)
        lse[start : start + length] = np.log(total)
    return out.astype(np.float32), lse.astype(np.float32)


@attrs.frozen(kw_only=True)
class Setting:
    """Shape and options of the attention whose bits are compared."""

    heads: int
    groups: int
    size: int
    window: int
    softcap: float


SETTINGS = (
    Setting(heads=6, groups=2, size=64, window=0, softcap=0.0),
    Setting(heads=4, groups=1, size=40, window=37, softcap=0.0),
    Setting(heads=2, groups=2, size=16, window=70, softcap=3.0),
)


@attrs.frozen
class _Text:
    """Queries, keys, values and output gradients (n, heads, size) of one whole sequence."""

    q: Array
    k: Array
    v: Array
    dout: Array


def check_attention_layouts(
    attention: Callable[..., Any], backward: Callable[..., Any] | None, backend: Backend, seed: int = 0
) -> None:
    """Raise `AssertionError` where a token's bits depend on the layout of the sequences.

    out, lse and, with `backward`, dq are compared over all layouts; dk and dv over those without a
    shared context, where they are sums of the same terms.
    """
    for setting in SETTINGS:
        texts = _texts(setting, np.random.default_rng(seed))
        runner = _Runner(attention, backward, backend, setting)
        alone = [runner.run(*_packed([text])) for text in texts]
        packed = runner.run(*_packed(texts))
        shared = runner.run(*_shared(texts))
        starts = np.cumsum([0, *(len(text.q) for text in texts)])
        answers = np.cumsum([PROMPT, *ANSWERS])
        for s, found in enumerate(alone):
            rows = slice(starts[s], starts[s + 1])
            for name, value in found.items():
                _same(packed[name][rows], value, f"{setting}: {name} of a packed sequence")
            for name in {"out", "lse", "dq"} & set(found):
                _same(shared[name][:PROMPT], found[name][:PROMPT], f"{setting}: {name} of a shared prompt")
                own = shared[name][answers[s] : answers[s + 1]]
                _same(own, found[name][PROMPT:], f"{setting}: {name} of an answer to a shared prompt")
        for name, value in _fed_in_chunks(runner, texts).items():
            whole = np.concatenate([found[name] for found in alone])
            _same(value, whole, f"{setting}: {name} of sequences fed in chunks over a cache")


def _same(found: Array, expected: Array, what: str) -> None:
    assert np.array_equal(found, expected), f"{what} has other bits than alone"


@attrs.frozen
class _Runner:
    attention: Callable[..., Any]
    backward: Callable[..., Any] | None
    backend: Backend
    setting: Setting

    def run(self, text: _Text, segments: Sequence[Sequence[int]]) -> dict[str, Array]:
        """out and lse of a layout, and its gradients."""
        place, dtype = self.backend.from_host, self.backend.compute_dtype
        table = np.array(segments, np.int64)
        q, k, v, dout = (place(array.astype(dtype)) for array in (text.q, text.k, text.v, text.dout))
        options = (self.setting.size**-0.5, self.setting.window, self.setting.softcap)
        out, lse = (
            place(np.full(text.q.shape, np.nan, dtype)),
            place(np.full(text.q.shape[:2], np.nan, dtype)),
        )
        self.attention(q, k, v, table, *options, out, lse)
        results = {"out": out, "lse": lse}
        if self.backward is not None and text.dout.size:
            dq, dk, dv = (place(np.zeros(array.shape, dtype)) for array in (text.q, text.k, text.v))
            self.backward(dout, q, k, v, out, lse, table, *options, dq, dk, dv)
            results |= {"dq": dq, "dk": dk, "dv": dv}
        return {name: np.array(self.backend.to_host(array)) for name, array in results.items()}


def _texts(setting: Setting, rng: Random) -> list[_Text]:
    shapes = (setting.heads, setting.groups, setting.groups, setting.heads)
    prompt = [normal(rng, PROMPT, heads, setting.size) for heads in shapes]
    return [_Text(*(np.concatenate([p, normal(rng, n, *p.shape[1:])]) for p in prompt)) for n in ANSWERS]


def _part(text: _Text, rows: slice) -> _Text:
    return _Text(*(array[rows] for array in attrs.astuple(text, recurse=False)))


def _joined(texts: Sequence[_Text]) -> _Text:
    arrays = (attrs.astuple(text, recurse=False) for text in texts)
    return _Text(*(np.concatenate(pieces) for pieces in zip(*arrays, strict=True)))


def _packed(texts: Sequence[_Text]) -> tuple[_Text, list[list[int]]]:
    starts = np.cumsum([0, *(len(text.q) for text in texts)]).tolist()
    return _joined(texts), [[starts[s], len(text.q), 0, 0, starts[s]] for s, text in enumerate(texts)]


def _shared(texts: Sequence[_Text]) -> tuple[_Text, list[list[int]]]:
    prompt = _part(texts[0], slice(PROMPT))
    both = _joined([prompt, *(_part(text, slice(PROMPT, None)) for text in texts)])
    starts = np.cumsum([PROMPT, *ANSWERS]).tolist()
    own = [[starts[s], n, 0, PROMPT, starts[s]] for s, n in enumerate(ANSWERS)]
    return both, [[0, PROMPT, 0, 0, 0], *own]


def _fed_in_chunks(runner: _Runner, texts: Sequence[_Text]) -> Mapping[str, Array]:
    """Sequences in a cache, a chunk of each a call; what is not yet written holds NaN."""
    room = max(len(text.q) for text in texts) + 5
    shape = (room * len(texts) + 3, *texts[0].k.shape[1:])
    k, v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    done = [0] * len(texts)
    parts: dict[str, list[list[Array]]] = {name: [[] for _ in texts] for name in ("out", "lse")}
    for chunk in (*CHUNKS, room):
        segments: list[list[int]] = []
        queries: list[Array] = []
        for s, text in enumerate(texts):
            count = min(chunk, len(text.q) - done[s])
            first = 3 + s * room
            rows = slice(done[s], done[s] + count)
            k[first + done[s] : first + done[s] + count] = text.k[rows]
            v[first + done[s] : first + done[s] + count] = text.v[rows]
            segments.append([sum(len(piece) for piece in queries), count, first, done[s], first + done[s]])
            queries.append(text.q[rows])
        q = np.concatenate(queries)
        found = runner.run(_Text(q, k, v, q[:0]), segments)
        for s, (start, count, *_) in enumerate(segments):
            done[s] += count
            for name, pieces in parts.items():
                pieces[s].append(found[name][start : start + count])
    return {name: np.concatenate([piece for s in pieces for piece in s]) for name, pieces in parts.items()}
