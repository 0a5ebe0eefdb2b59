"""The tables of `_stack_layout` for a stack of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import BlockOperands, BlockProjection, BlockStack, KernelError, QuantMatrix

from . import _stack_layout as at
from ._decode import FORMATS
from ._gemm_workspace import Floats
from ._math_gated import KINDS
from ._rows import ROWS_FORMATS
from ._rows_kinds import BLOCK, FLOAT_BLOCK, RECORD
from ._simd_rows import ROWS

TASKS_A_THREAD = 6
WORDS = np.dtype(np.int64)


def bits(value: float) -> int:
    """A float32 as the word of a table."""
    return int(np.array([value, 0.0], np.float32).view(np.int64)[0])


def served(stack: BlockStack) -> bool:
    """True if the tables can express the stack: weights of 16 rows or more and whole blocks of 32 columns,
    heads of whole lanes, a cache of 16 rows or more."""
    weights = [one.weight for block in stack.blocks for one in block.projections]
    caches = [block.keys for block in stack.blocks]
    return (
        all(w.rows >= ROWS and w.columns % BLOCK == 0 and w.format in ROWS_FORMATS for w in weights)
        and all(keys.shape[0] >= ROWS and keys.shape[2] % ROWS == 0 for keys in caches)
        and all(keys.dtype in (np.float32, np.float16) for keys in caches)
    )


@attrs.define(eq=False)
class _Buffers:
    """Places in one stretch of scratch, as multiples of 64 bytes."""

    used: int = 0

    def take(self, count: int) -> int:
        """Offset in bytes of room for `count` bytes."""
        place = self.used
        self.used += -(-count // 64) * 64
        return place


class StackProgram:
    """Tables for passes of up to `capacity` tokens. Holds addresses of the stack's arrays, not the arrays.

    Args:
        unpack: address of the compiled function for a weight format, of `_rows`.
    """

    def __init__(self, stack: BlockStack, capacity: int, threads: int, unpack: Callable[[str], int]) -> None:
        self.capacity = capacity
        self._stack = stack
        self._threads = threads
        self._unpack = unpack
        self._buffers = _Buffers()
        self._moves: list[tuple[list[int], int]] = []
        self._members: list[list[int]] = []
        self._phases: list[list[int]] = []
        self._held: list[Any] = []
        first = stack.blocks[0]
        self.width = first.attention_norm.shape[0]
        self.head_size, self.kv_heads = first.keys.shape[2], first.keys.shape[1]
        self.cache_rows = min(block.keys.shape[0] for block in stack.blocks)
        self.positions = min(block.cos.shape[0] for block in stack.blocks)
        self._ffn = max(block.gate.weight.rows for block in stack.blocks)
        self._lay_out()
        for number, block in enumerate(stack.blocks):
            self._block(block, stack.blocks[number - 1] if number else None)
        self._rows_phase(0, self.width, delta=(self._down, stack.blocks[-1].post_mlp_norm))
        del self._stack, self._unpack
        self.memory: Floats = _aligned(self._buffers.used)
        self._relocate(self.memory.ctypes.data)
        self.members = np.array(self._members, WORDS)
        self.phases = np.array([row + [0] * (at.PHASE_WORDS - len(row)) for row in self._phases], WORDS)
        del self._members, self._phases, self._moves

    def _lay_out(self) -> None:
        """Room for intermediate results, used again by every block."""
        tokens, stack = self.capacity, self._stack
        queries, keys = stack.heads * self.head_size, self.kv_heads * self.head_size
        longest = max(self.width, queries, self._ffn)

        def rows(width: int) -> int:
            return self._buffers.take(4 * tokens * width)

        self._normed = rows(self.width)
        self._q, self._k, self._v = rows(queries), rows(keys), rows(keys)
        self._heads_out, self._attended = rows(queries), rows(self.width)
        self._product, self._down, self._spare = rows(self._ffn), rows(self.width), rows(self._ffn)
        rank = max(
            (0 if one.a is None else one.a.shape[0] for b in stack.blocks for one in b.projections), default=0
        )
        self._hidden = [rows(-(-rank // FLOAT_BLOCK) * FLOAT_BLOCK) for _ in range(3)]
        biases = {ROWS_FORMATS[one.weight.format] for b in stack.blocks for one in b.projections}
        kinds = {at.FLOAT_RECORDS if one.floats else one.bias for one in biases}
        self._records = {
            kind: rows(longest if kind == at.FLOAT_RECORDS else longest // BLOCK * RECORD // 4 + RECORD)
            for kind in kinds
        }

    def _relocate(self, base: int) -> None:
        for row, place in self._moves:
            row[place] += base

    def _at(self, row: list[int], *places: int) -> None:
        """Entries of `row` that are offsets into the memory of the program."""
        self._moves += [(row, place) for place in places]

    def _address(self, array: Any, dtype: Any = np.float32) -> int:
        """Address of an array; 0 for None."""
        if array is None:
            return 0
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise KernelError(
                f"decode_blocks: an array of shape {array.shape} is {array.dtype}, or not contiguous, where"
                f" contiguous {np.dtype(dtype).name} is needed"
            )
        self._held.append(array)
        return int(array.ctypes.data)

    def _block(self, block: BlockOperands, before: BlockOperands | None) -> None:
        stack = self._stack
        queries, keys = stack.heads * self.head_size, self.kv_heads * self.head_size
        delta = None if before is None else (self._down, before.post_mlp_norm)
        inputs = self._project(
            (block.q, block.k, block.v), (self._q, self._k, self._v), (queries, keys, keys)
        )
        self._rows_phase(0, self.width, delta=delta, norm=block.attention_norm, members=inputs)
        self._product_phase(inputs)
        self._rotate_phase(block)
        self._attend_phase(block)
        output = self._project((block.output,), (self._attended,), (self.width,))
        self._rows_phase(self._heads_out, queries, members=output)
        self._product_phase(output)
        delta = (self._attended, block.post_attention_norm)
        gate = self._project((block.gate, block.up), (self._product, self._spare), (self._ffn, self._ffn))
        self._rows_phase(0, self.width, delta=delta, norm=block.mlp_norm, members=gate)
        self._product_phase(gate, gate=1 + KINDS.index(stack.activation))
        down = self._project((block.down,), (self._down,), (self.width,))
        self._rows_phase(self._product, block.down.weight.columns, members=down)
        self._product_phase(down)

    def _project(
        self, projections: Sequence[BlockProjection], outs: Sequence[int], widths: Sequence[int]
    ) -> range:
        """Members for projections of one input; their numbers."""
        first, group = len(self._members), 0
        for one, out, width, hidden in zip(projections, outs, widths, self._hidden, strict=False):
            weight = one.weight
            layout = FORMATS[weight.format]
            blocks = weight.columns // layout.values
            if weight.rows != width:
                raise KernelError(f"decode_blocks: {weight.name!r} has {weight.rows} rows, not {width}")
            row = [0] * at.MEMBER_WORDS
            row[at.UNPACK] = self._unpack(weight.format)
            row[at.DATA] = self._weight(weight, blocks * layout.bytes)
            row[at.ROW_BYTES], row[at.BLOCKS] = blocks * layout.bytes, blocks
            row[at.OUTPUTS], row[at.FIRST_GROUP] = weight.rows, group
            row[at.RECORDS] = self._records[_records_of(weight)]
            row[at.BIAS] = self._address(one.bias)
            row[at.OUT] = out
            self._at(row, at.RECORDS, at.OUT)
            if one.a is not None:
                row[at.ADAPTER_A], row[at.ADAPTER_B] = self._address(one.a), self._address(one.b)
                row[at.RANK], row[at.ADAPTER_SCALE] = one.a.shape[0], bits(one.scale)
                row[at.HIDDEN] = hidden
                self._at(row, at.HIDDEN)
            self._members.append(row)
            group += -(-weight.rows // ROWS)
        return range(first, len(self._members))

    def _weight(self, weight: QuantMatrix, row_bytes: int) -> int:
        if weight.data.shape[1] != row_bytes:
            raise KernelError(
                f"weight {weight.name!r}: a row of {weight.columns} {weight.format} values has {row_bytes}"
                f" bytes, not {weight.data.shape[1]}; the file is damaged or names the wrong format"
            )
        return self._address(weight.data, np.uint8)

    def _rows_phase(
        self,
        source: int,
        width: int,
        *,
        delta: tuple[int, Any] | None = None,
        norm: Any = None,
        members: range = range(0),
    ) -> None:
        row = [0] * at.PHASE_WORDS
        row[at.OP], row[at.ROWS_SOURCE], row[at.ROWS_WIDTH] = at.ROWS, source, width
        row[at.ROWS_EPSILON] = bits(self._stack.epsilon)
        if source:
            self._at(row, at.ROWS_SOURCE)
        if delta is not None:
            row[at.ROWS_DELTA], row[at.ROWS_DELTA_NORM] = delta[0], self._address(delta[1])
            self._at(row, at.ROWS_DELTA)
        if norm is not None:
            row[at.ROWS_NORM], row[at.ROWS_NORMED] = self._address(norm), self._normed
            self._at(row, at.ROWS_NORMED)
        row[at.ROWS_FIRST_MEMBER], row[at.ROWS_MEMBERS] = members.start, len(members)
        kinds = {self._members[m][at.RECORDS] for m in members}
        conversions = [(kind, place) for kind, place in self._records.items() if place in kinds]
        row[at.ROWS_CONVERSIONS] = len(conversions)
        for number, (kind, place) in enumerate(conversions):
            entry = at.ROWS_CONVERSION + 2 * number
            row[entry], row[entry + 1] = kind, place
            self._at(row, entry + 1)
        self._phases.append(row)

    def _product_phase(self, members: range, *, gate: int = 0) -> None:
        row = [0] * at.PHASE_WORDS
        row[at.OP], row[at.PRODUCT_GATE] = at.PRODUCT, gate
        row[at.PRODUCT_FIRST_MEMBER], row[at.PRODUCT_MEMBERS] = members.start, len(members)
        counted = members[:1] if gate else members
        groups = sum(-(-self._members[m][at.OUTPUTS] // ROWS) for m in counted)
        row[at.PRODUCT_GROUPS] = groups
        row[at.PRODUCT_TASK_GROUPS] = max(1, groups // (self._threads * TASKS_A_THREAD))
        self._phases.append(row)

    def _rotate_phase(self, block: BlockOperands) -> None:
        row = [0] * at.PHASE_WORDS
        row[at.OP] = at.ROTATE
        row[at.ROTATE_Q], row[at.ROTATE_K], row[at.ROTATE_V] = self._q, self._k, self._v
        self._at(row, at.ROTATE_Q, at.ROTATE_K, at.ROTATE_V)
        row[at.ROTATE_HEADS], row[at.ROTATE_KV_HEADS] = self._stack.heads, self.kv_heads
        row[at.ROTATE_SIZE], row[at.ROTATE_HALF] = self.head_size, block.cos.shape[1]
        row[at.ROTATE_COS], row[at.ROTATE_SIN] = self._address(block.cos), self._address(block.sin)
        row[at.ROTATE_INTERLEAVED] = int(self._stack.interleaved)
        row[at.ROTATE_Q_NORM] = self._address(block.q_norm)
        row[at.ROTATE_K_NORM] = self._address(block.k_norm)
        row[at.ROTATE_EPSILON] = bits(self._stack.epsilon)
        row[at.ROTATE_KEYS] = self._address(block.keys, block.keys.dtype)
        row[at.ROTATE_VALUES] = self._address(block.values, block.keys.dtype)
        row[at.ROTATE_NARROW] = int(block.keys.dtype == np.float16)
        self._phases.append(row)

    def _attend_phase(self, block: BlockOperands) -> None:
        row = [0] * at.PHASE_WORDS
        row[at.OP], row[at.ATTEND_Q], row[at.ATTEND_OUT] = at.ATTEND, self._q, self._heads_out
        self._at(row, at.ATTEND_Q, at.ATTEND_OUT)
        row[at.ATTEND_HEADS], row[at.ATTEND_KV_HEADS] = self._stack.heads, self.kv_heads
        row[at.ATTEND_SIZE], row[at.ATTEND_ROWS] = self.head_size, block.keys.shape[0]
        row[at.ATTEND_KEYS] = self._address(block.keys, block.keys.dtype)
        row[at.ATTEND_VALUES] = self._address(block.values, block.keys.dtype)
        narrow = block.keys.dtype == np.float16
        row[at.ATTEND_NARROW] = int(narrow)
        row[at.ATTEND_WINDOW] = block.window
        row[at.ATTEND_SCALE], row[at.ATTEND_SOFTCAP] = bits(self._stack.scale), bits(self._stack.softcap)
        self._phases.append(row)


def _records_of(weight: QuantMatrix) -> int:
    """Bias of the records that a weight is multiplied with, or FLOAT_RECORDS."""
    rows = ROWS_FORMATS[weight.format]
    return at.FLOAT_RECORDS if rows.floats else rows.bias


def _aligned(count: int) -> npt.NDArray[Any]:
    """Zeroed bytes that begin on a cache line."""
    raw = np.zeros(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count]
