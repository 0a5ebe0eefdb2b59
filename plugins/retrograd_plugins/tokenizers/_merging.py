"""Merging neighbouring symbols by rank, the loop behind byte-pair encoding and SentencePiece.

Own code, because no library merges as llama.cpp does: `tokenizers` drops a symbol that the vocabulary
lacks before it merges, so that its neighbours meet (SmolLM2 lacks 21 of the 256 bytes), and knows neither
SentencePiece's scores nor their ties.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush


def merge_symbols(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Merge the pair of neighbours with the lowest rank, the leftmost of equals, until none has one.

    `rank(left, right)` is None for a pair that never merges. Empty symbols are not allowed in; the list
    that comes in is overwritten.
    """
    count = len(symbols)
    queue: list[tuple[float, int, int, int]] = []
    for left in range(count - 1):
        priority = rank(symbols[left], symbols[left + 1])
        if priority is not None:
            queue.append((priority, left, left + 1, len(symbols[left]) + len(symbols[left + 1])))
    if not queue:
        return symbols
    heapify(queue)
    before = list(range(-1, count - 1))
    after = list(range(1, count + 1))
    while queue:
        _, left, right, length = heappop(queue)
        # A symbol that was merged away is empty, one that has grown is longer: either makes the entry stale.
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != length:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        following = after[left] = after[right]
        if following < count:
            before[following] = left
        for first, second in ((before[left], left), (left, following)):
            if first >= 0 and second < count:
                priority = rank(symbols[first], symbols[second])
                if priority is not None:
                    heappush(queue, (priority, first, second, len(symbols[first]) + len(symbols[second])))
    return [symbol for symbol in symbols if symbol]
