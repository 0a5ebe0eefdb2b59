"""Intervals of integers, as pairs (first, last), both included."""


def merge(intervals):
    """Join intervals that overlap or follow on each other; sorted."""
    merged = []
    for first, last in sorted(intervals):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged
