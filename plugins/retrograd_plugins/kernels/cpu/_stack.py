"""`decode_blocks`: all blocks of a model on a few tokens, in one call of compiled code."""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from numba import cfunc, types

from retrograd_hookspecs import BlockStack, KernelError

from . import _stack_layout as at
from ._gemm_workspace import Floats, round_up
from ._rows import compiled_rows
from ._simd_rows import ROWS
from ._stack_program import StackProgram, served
from ._stack_tasks import run_stack, work

LEAST_TOKENS = 16
"""Tables are made for at least this many tokens at once."""
ENOUGH_TASKS = 2
"""Tokens a thread, at least, that attention is split by tokens alone; with fewer by heads, too."""
MOST_TOGETHER = 4
"""Tokens of a task of attention: with more, their scores leave the nearest caches."""
ROWS_TOGETHER = 4
"""Tokens whose adapters are one task, where every thread has one."""
MOST_SHARES = 8
"""Into how many stretches tasks are split, at most: a thread looks at all of them in every phase."""
WORK_SIGNATURE = types.void(types.int64, types.int64)


@attrs.frozen(eq=False, kw_only=True)
class _Tasks:
    """What `_attention_tasks` gave, and for what."""

    key: tuple[bytes, int, int]
    order: npt.NDArray[np.int64]
    table: npt.NDArray[np.int64]
    together: int
    """Most tokens of a task."""


class StackOps:
    """`decode_blocks` on one kind of processor (see `_rows_kinds`); compiled at the first call."""

    def __init__(self, kind: int, threads: int) -> None:
        self._kind = kind
        self._threads = threads
        self._unpack: dict[str, Any] = {}
        self._worker: Any = None
        self._programs: weakref.WeakKeyDictionary[BlockStack, StackProgram] = weakref.WeakKeyDictionary()
        self._scratch = np.zeros(0, np.uint8)
        self._tasks: _Tasks | None = None
        self._yield, self._library = _yielder()

    def decode_blocks(
        self, x: Floats, positions: npt.NDArray[np.int32], segments: npt.NDArray[np.int64], stack: BlockStack
    ) -> bool:
        """x (T, E) through all blocks, in place; False for a stack that is not `served`.

        Raises:
            KernelError: shapes or types that do not fit the stack.
        """
        tokens = x.shape[0]
        program = self._programs.get(stack)
        if program is None or program.capacity < tokens:
            if not served(stack):
                return False
            program = StackProgram(stack, max(LEAST_TOKENS, tokens), self._threads, self._address)
            self._programs[stack] = program
        if x.shape != (tokens, program.width) or x.dtype != np.float32 or not x.flags.c_contiguous:
            raise KernelError(
                f"decode_blocks: x must be contiguous float32 (T, {program.width}), not {x.dtype} {x.shape}"
            )
        spans = _spans(tokens, positions, segments)
        longest = self._check(spans, program)
        tasks = self._attention(spans, stack.heads, stack.heads // program.kv_heads)
        # Lanes are written up to 16 elements beyond the last score, and 16 more to end them.
        scores = round_up(longest + 2 * ROWS, ROWS)
        together = tasks.together
        attention = 4 * (
            round_up(stack.heads * together, ROWS)
            + stack.heads * together * scores
            + ROWS * (program.head_size + 1)
        )
        each = round_up(max(2 * 64 * tokens, attention) + 64, 64)
        if self._scratch.size < each * self._threads + 64:
            self._scratch = np.zeros(2 * each * self._threads + 64, np.uint8)
        shares = min(self._threads, MOST_SHARES)
        control = np.zeros((len(program.phases) * (shares + 1) + 1) * at.LINE_BYTES // 8, np.int64)
        state = np.zeros(at.STATE_WORDS, np.int64)
        state[at.TOKENS], state[at.RESIDUAL] = tokens, place_of(x)
        state[at.SPANS], state[at.CONTROL] = place_of(spans), round_up(place_of(control), 64)
        state[at.PROGRAM], state[at.PHASES] = place_of(program.phases), len(program.phases)
        state[at.MEMBERS], state[at.YIELD] = place_of(program.members), self._yield
        state[at.SCRATCH] = round_up(place_of(self._scratch), 64)
        state[at.SCRATCH_BYTES], state[at.UNPACK_F32] = each, self._address("F32")
        state[at.SCORES], state[at.ORDER] = scores, place_of(tasks.order)
        state[at.TASKS], state[at.ATTEND_TASKS] = place_of(tasks.table), len(tasks.table)
        state[at.ROWS_TOGETHER] = ROWS_TOGETHER if tokens >= ROWS_TOGETHER * self._threads else 1
        state[at.SHARES] = shares
        if self._worker is None:
            self._worker = cfunc(WORK_SIGNATURE, cache=True, error_model="numpy")(work)
        run_stack(self._worker.address, state, self._threads)
        return True

    def _attention(self, spans: npt.NDArray[np.int64], heads: int, shared: int) -> _Tasks:
        """The tasks of attention; those of the pass before where contexts are the same."""
        contexts = spans[:, [at.CONTEXT_START, at.CONTEXT_LENGTH]].tobytes()
        key = (contexts, heads, shared)
        if self._tasks is None or self._tasks.key != key:
            order, table = _attention_tasks(spans, heads, shared, self._threads)
            together = int(table[:, at.TASK_TOKENS].max())
            self._tasks = _Tasks(key=key, order=order, table=table, together=together)
        return self._tasks

    def _address(self, format_name: str) -> int:
        if format_name not in self._unpack:
            self._unpack[format_name] = compiled_rows(format_name, self._kind)
        return int(self._unpack[format_name].address)

    def _check(self, spans: npt.NDArray[np.int64], program: StackProgram) -> int:
        """The most rows that a token sees."""
        own = spans[:, at.OWN_INDEX] + 1
        seen = spans[:, at.CONTEXT_LENGTH]
        rows = max(int((spans[:, at.OWN_START] + own).max()), int((spans[:, at.CONTEXT_START] + seen).max()))
        position = int(spans[:, at.POSITION].max())
        if rows > program.cache_rows or position >= program.positions:
            raise KernelError(
                f"decode_blocks: segments reach row {rows - 1} of {program.cache_rows} of the cache,"
                f" positions {position} of {program.positions}"
            )
        return int((seen + own).max())


def _spans(
    tokens: int, positions: npt.NDArray[np.int32], segments: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """A row a token, as `_stack_layout` describes."""
    spans = np.empty((tokens, at.SPAN_WORDS), np.int64)
    lengths = segments[:, 1].tolist()
    if sum(lengths) != tokens or len(positions) != tokens:
        raise KernelError(f"decode_blocks: segments of {sum(lengths)} tokens for {tokens}")
    if max(lengths, default=0) == 1:
        owner, rows = segments, segments[:, 0]
    else:
        owner = np.repeat(segments, lengths, axis=0)
        rows = np.concatenate([np.arange(start, start + count) for start, count in segments[:, :2]])
    spans[rows, at.CONTEXT_START], spans[rows, at.CONTEXT_LENGTH] = owner[:, 2], owner[:, 3]
    spans[rows, at.OWN_START] = owner[:, 4]
    spans[:, at.POSITION] = positions
    spans[:, at.OWN_INDEX] = spans[:, at.POSITION] - spans[:, at.CONTEXT_LENGTH]
    if (spans[:, at.OWN_INDEX] < 0).any():
        raise KernelError("decode_blocks: segments with a position inside their context")
    return spans


def _attention_tasks(
    spans: npt.NDArray[np.int64], heads: int, shared: int, threads: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens in the order of the tasks, and a row a task as `_stack_layout` describes: tokens of one context
    together, or, where those are too few for the threads, single tokens and the `shared` heads of one head of
    keys, which read it once; single heads where even so there are fewer tasks than threads."""
    tokens, wanted = len(spans), ENOUGH_TASKS * threads
    if tokens < wanted:
        order = np.arange(tokens)
        step = shared if tokens * (heads // shared) >= threads else 1
        tasks = [(token, 1, head, head + step) for token in range(tokens) for head in range(0, heads, step)]
        return order, np.array(tasks, np.int64)
    order = np.lexsort((spans[:, at.CONTEXT_LENGTH], spans[:, at.CONTEXT_START]))
    contexts = spans[order][:, [at.CONTEXT_START, at.CONTEXT_LENGTH]]
    together = min(MOST_TOGETHER, tokens // wanted)
    tasks = []
    first = 0
    for token in range(1, tokens + 1):
        if token == tokens or token - first == together or (contexts[token] != contexts[first]).any():
            tasks.append((first, token - first, 0, heads))
            first = token
    return order, np.array(tasks, np.int64)


def place_of(array: npt.NDArray[Any]) -> int:
    """Address of an array. `ndarray.ctypes` takes several times as long."""
    return int(array.__array_interface__["data"][0])


def _yielder() -> tuple[int, Any]:
    """Address of the system's function that lets other threads run, and the library that holds it."""
    if sys.platform == "win32":
        library: Any = ctypes.WinDLL("kernel32")
        function = library.SwitchToThread
    else:
        library = ctypes.CDLL(None)
        function = library.sched_yield
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0), library
