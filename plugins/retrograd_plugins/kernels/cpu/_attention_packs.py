"""Operands of attention on tiles, and the products of a square of 32 keys and 32 queries.

Operands are whole tiles of 1024 bytes, one after the other: left ones of 16 rows by 32 steps, right ones of
16 pairs of steps by 16 columns. *Split* operands are pairs of tiles, of high and of low halves (see
`_attention_halves`). Three products, low · high + high · high + high · low, then keep float32's precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from numba import njit

from ._attention_blocks import ZERO, round_up
from ._attention_halves import halve, halve_turned
from ._attention_lanes import ALL, CAUSAL, SQUARE, VISIBLE, WINDOWED
from ._math_common import INT, SERIAL
from ._math_lanes import fill_lanes
from ._rows_kinds import TILE_BYTES, TILE_PAIR
from ._simd import WIDTH
from ._simd_memory import peek, poke
from ._simd_tiles import (
    convert_bfloats,
    pack_tile_from_columns,
    tile_load,
    tile_multiply,
    tile_store,
    tile_zero,
    transpose_floats,
)
from ._stack_memory import lanes_at, put_lanes

STEP = 32
"""Steps of a tile product, and rows and columns of a square of four tiles."""
HALF = 16
"""Rows and columns of a tile."""
LINE = 64
"""Bytes of a tile's row."""
CHUNK_ROWS = 384
"""Rows (queries times heads that share a key/value head) of a chunk, at most."""
CHUNK_FLOATS = 1 << 16
"""Elements of a chunk's panel, at most: 16 bytes each is half of the second cache."""
INLINE: Mapping[str, Any] = MappingProxyType({"inline": "always"})


@njit(**SERIAL)
def tile_width(size: Any) -> Any:
    """Columns of a panel of heads of `size`."""
    return round_up(size, STEP)


@njit(INT(INT, INT, INT), **SERIAL)
def queries_per_chunk(heads: Any, groups: Any, size: Any) -> Any:
    """Queries of a chunk, at least one."""
    rows = min(CHUNK_ROWS, CHUNK_FLOATS // tile_width(size))
    return max(1, rows // (heads // groups))


@njit(**SERIAL)
def what_is_hidden(key: Any, earliest: Any, latest: Any, window: Any) -> Any:
    """What 32 keys from position `key` on hide from queries at positions [earliest, latest]."""
    last = key + SQUARE - 1
    if key > latest or (window > 0 and last <= earliest - window):
        return ALL
    if window > 0 and key <= latest - window:
        return WINDOWED
    return CAUSAL if last > earliest else VISIBLE


@njit(**SERIAL)
def gather(source: Any, pitch: Any, rows: Any, size: Any, factor: Any, target: Any, width: Any) -> None:
    """Panel rows = factor · rows of `size` float32, `pitch` bytes apart, filled up with zeros to `width`."""
    whole = size // WIDTH * WIDTH
    for _ in range(rows):
        for d in range(0, whole, WIDTH):
            put_lanes(target + 4 * d, lanes_at(source + 4 * d) * factor)
        for d in range(whole, size):
            poke(target + 4 * d, peek(source + 4 * d) * factor)
        for d in range(size, width):
            poke(target + 4 * d, ZERO)
        source += pitch
        target += 4 * width


@njit(**SERIAL)
def clear(target: Any, count: Any) -> None:
    """Zero `count` float32, whole lanes."""
    for i in range(0, count, WIDTH):
        put_lanes(target + 4 * i, fill_lanes(ZERO))


@njit(**SERIAL)
def gather_chunk(
    source: Any, pitch: Any, count: Any, ratio: Any, size: Any, factor: Any, panel: Any, width: Any, tall: Any
) -> None:
    """Panel of `count` queries of `ratio` heads each, filled up with zeros to `tall` rows."""
    for i in range(count):
        gather(source + i * pitch, 4 * size, ratio, size, factor, panel + 4 * i * ratio * width, width)
    clear(panel + 4 * count * ratio * width, (tall - count * ratio) * width)


@njit(**SERIAL)
def scatter(source: Any, width: Any, rows: Any, size: Any, factor: Any, target: Any, pitch: Any) -> None:
    """Rows of `size` float32, `pitch` bytes apart, = factor · panel rows."""
    whole = size // WIDTH * WIDTH
    for _ in range(rows):
        for d in range(0, whole, WIDTH):
            put_lanes(target + 4 * d, lanes_at(source + 4 * d) * factor)
        for d in range(whole, size):
            poke(target + 4 * d, peek(source + 4 * d) * factor)
        source += 4 * width
        target += pitch


@njit(**SERIAL)
def scatter_add(source: Any, width: Any, rows: Any, size: Any, target: Any, pitch: Any) -> None:
    """Rows of `size` float32, `pitch` bytes apart, += panel rows."""
    whole = size // WIDTH * WIDTH
    for _ in range(rows):
        for d in range(0, whole, WIDTH):
            put_lanes(target + 4 * d, lanes_at(target + 4 * d) + lanes_at(source + 4 * d))
        for d in range(whole, size):
            poke(target + 4 * d, peek(target + 4 * d) + peek(source + 4 * d))
        source += 4 * width
        target += pitch


@njit(**SERIAL)
def split_left(source: Any, target: Any, rows: Any, width: Any) -> None:
    """Rows of a panel as rows of a split left operand: tiles by (16 rows, step)."""
    for i in range(rows):
        place = target + TILE_PAIR * (i // HALF * (width // STEP)) + LINE * (i % HALF)
        for d in range(0, width, STEP):
            halve(source + 4 * (i * width + d), place)
            place += TILE_PAIR


@njit(**SERIAL)
def split_right(source: Any, target: Any, rows: Any, width: Any) -> None:
    """Rows of a panel as columns of a split right operand: tiles by (32 rows, step, 16 rows)."""
    for i in range(0, rows, HALF):
        place = target + TILE_PAIR * (i // STEP * 2 * (width // STEP) + i // HALF % 2)
        for d in range(0, width, STEP):
            halve_turned(source + 4 * (i * width + d), 4 * width, place)
            place += 2 * TILE_PAIR


@njit(**SERIAL)
def pack_right(source: Any, target: Any, rows: Any, width: Any) -> None:
    """Rows of a panel as rows of a right operand: tiles by (32 rows, 16 columns)."""
    for i in range(0, rows, STEP):
        for d in range(0, width, HALF):
            pack_tile_from_columns(source + 4 * (i * width + d), 4 * width, target)
            target += TILE_BYTES


@njit(**SERIAL)
def pack_turned(source: Any, target: Any, rows: Any, width: Any, spare: Any) -> None:
    """Rows of a panel as columns of a left operand: tiles by (16 columns, 32 rows). `spare`: 512 float32."""
    for d in range(0, width, HALF):
        for i in range(0, rows, STEP):
            for half in range(2):
                place = source + 4 * ((i + HALF * half) * width + d)
                transpose_floats(HALF, place, 4 * width, spare + LINE * half, 4 * STEP)
            for row in range(HALF):
                convert_bfloats(spare + 4 * STEP * row, target + LINE * row)
            target += TILE_BYTES


@njit(**SERIAL)
def split_turned(source: Any, target: Any, rows: Any, width: Any, spare: Any) -> None:
    """As `pack_turned`, in halves."""
    for d in range(0, width, HALF):
        for i in range(0, rows, STEP):
            for half in range(2):
                place = source + 4 * ((i + HALF * half) * width + d)
                transpose_floats(HALF, place, 4 * width, spare + LINE * half, 4 * STEP)
            for row in range(HALF):
                halve(spare + 4 * STEP * row, target + LINE * row)
            target += TILE_PAIR


@njit(**INLINE)
def zero_square() -> None:
    """Zero registers 0 to 3, the sums of a square."""
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)


@njit(**INLINE)
def split_step(left: Any, lower: Any, right: Any) -> None:
    """Add a step of 32 rows of a split left (`lower`: the last 16) by 32 columns of a split right operand."""
    tile_load(6, left + TILE_BYTES, LINE)
    tile_load(4, right, LINE)
    tile_multiply(0, 6, 4)
    tile_load(5, right + TILE_PAIR, LINE)
    tile_multiply(1, 6, 5)
    tile_load(7, lower + TILE_BYTES, LINE)
    tile_multiply(2, 7, 4)
    tile_multiply(3, 7, 5)
    tile_load(6, left, LINE)
    tile_multiply(0, 6, 4)
    tile_multiply(1, 6, 5)
    tile_load(7, lower, LINE)
    tile_multiply(2, 7, 4)
    tile_multiply(3, 7, 5)
    tile_load(4, right + TILE_BYTES, LINE)
    tile_multiply(0, 6, 4)
    tile_multiply(2, 7, 4)
    tile_load(5, right + TILE_PAIR + TILE_BYTES, LINE)
    tile_multiply(1, 6, 5)
    tile_multiply(3, 7, 5)


@njit(**INLINE)
def store_square(target: Any, stride: Any) -> None:
    """Store the sums as 32 rows of 32 float32, `stride` bytes apart."""
    tile_store(0, target, stride)
    tile_store(1, target + LINE, stride)
    tile_store(2, target + HALF * stride, stride)
    tile_store(3, target + HALF * stride + LINE, stride)


@njit(**SERIAL)
def add_square(left: Any, group: Any, right: Any, jump: Any, target: Any, stride: Any, steps: Any) -> None:
    """32 by 32 float32 at `target`, rows `stride` bytes apart, += left · right over `steps`, or none.

    The left operand's lower 16 rows lie `group` bytes behind the upper ones, the right one's next step `jump`
    bytes behind the one before.
    """
    if steps <= 0:
        return
    tile_load(0, target, stride)
    tile_load(1, target + LINE, stride)
    tile_load(2, target + HALF * stride, stride)
    tile_load(3, target + HALF * stride + LINE, stride)
    for _ in range(steps):
        tile_load(4, left, LINE)
        tile_load(6, right, LINE)
        tile_multiply(0, 4, 6)
        tile_load(7, right + TILE_BYTES, LINE)
        tile_multiply(1, 4, 7)
        tile_load(5, left + group, LINE)
        tile_multiply(2, 5, 6)
        tile_multiply(3, 5, 7)
        left += TILE_BYTES
        right += jump
    store_square(target, stride)


@njit(**SERIAL)
def split_square(left: Any, right: Any, target: Any, steps: Any) -> None:
    """32 by 32 float32 at `target` = 32 rows of a split left by 32 columns of a split right operand."""
    lower = left + TILE_PAIR * steps
    zero_square()
    for _ in range(steps):
        split_step(left, lower, right)
        left += TILE_PAIR
        lower += TILE_PAIR
        right += 2 * TILE_PAIR
    store_square(target, 4 * STEP)


@njit(**SERIAL)
def add_split_square(left: Any, group: Any, right: Any, target: Any, steps: Any) -> None:
    """As `split_square`, added to `target`; the left operand's lower 16 rows lie `group` bytes behind."""
    tile_load(0, target, 4 * STEP)
    tile_load(1, target + LINE, 4 * STEP)
    tile_load(2, target + HALF * 4 * STEP, 4 * STEP)
    tile_load(3, target + HALF * 4 * STEP + LINE, 4 * STEP)
    for _ in range(steps):
        split_step(left, left + group, right)
        left += TILE_PAIR
        right += 2 * TILE_PAIR
    store_square(target, 4 * STEP)
