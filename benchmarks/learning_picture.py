"""The curves of `benchmarks.learning` as SVG: held-out reward by update, and by time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 900, 380
TOP, BOTTOM, LEFT, GAP = 56, 56, 60, 70
PANEL = (WIDTH - LEFT - GAP - 24) / 2
COLORS = ("#1f6fb4", "#d1701f", "#2c8a4b", "#8d4fa8", "#b33a3a")
MEAN_COLOR = "#222222"

Line = Sequence[tuple[float, float]]


def draw(data: Mapping[str, Any]) -> str:
    """The picture of what `to_json` of `benchmarks.learning` returns."""
    runs = data["runs"]
    by_update = [[(p["update"], p["reward"]) for p in run["points"]] for run in runs]
    scale = 60.0 * data["processors"]
    by_time = [[(p["processor_seconds"] / scale, p["reward"]) for p in run["points"]] for run in runs]
    lowest = min(0.0, *(y for line in by_update for _, y in line))
    highest = max(1.0, *(y for line in by_update for _, y in line))
    bottom = HEIGHT - BOTTOM
    names = [f"seed {run['seed']}" for run in runs]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="#222222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{escape(data["example"])}: mean held-out reward</text>',
        *_legend(names, mean=len(runs) > 1),
    ]
    cores = f"{data['processors']} core{'s' if data['processors'] != 1 else ''}"
    panels = ((LEFT, by_update, "updates", True), (LEFT + PANEL + GAP, by_time, f"minutes of {cores}", False))
    for left, lines, label, with_mean in panels:
        frame = Frame(left, TOP, left + PANEL, bottom, lines, lowest, highest)
        parts += frame.axes(label)
        parts += [frame.line(line, COLORS[i % len(COLORS)], 1.6) for i, line in enumerate(lines)]
        if with_mean and len(lines) > 1:
            parts.append(frame.line(mean(lines), MEAN_COLOR, 3.0))
    return "\n".join([*parts, "</svg>"]) + "\n"


def mean(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """Mean over the lines at each x that all of them have."""
    tables = [dict(line) for line in lines]
    shared = sorted(set(tables[0]).intersection(*tables[1:]))
    return [(x, sum(table[x] for table in tables) / len(tables)) for x in shared]


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers from low to high, at most `most` + 1; steps are 1, 2, or 5 times a power of ten."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


class Frame:
    """A panel: its coordinates from 0 and `lowest` on, its axes, and lines in it."""

    def __init__(
        self,
        left: float,
        top: float,
        right: float,
        bottom: float,
        lines: Sequence[Line],
        lowest: float,
        highest: float,
    ) -> None:
        self._left, self._top, self._right, self._bottom = left, top, right, bottom
        self._x_end = max((x for line in lines for x, _ in line), default=1.0) or 1.0
        self._lowest, self._highest = lowest, highest

    def x(self, value: float) -> float:
        return self._left + value / self._x_end * (self._right - self._left)

    def y(self, value: float) -> float:
        share = (value - self._lowest) / (self._highest - self._lowest)
        return self._bottom - share * (self._bottom - self._top)

    def axes(self, label: str) -> list[str]:
        parts = []
        for tick in ticks(self._lowest, self._highest):
            y = self.y(tick)
            parts.append(
                f'<path d="M{self._left:.1f} {y:.1f}H{self._right:.1f}" stroke="#dddddd"/>'
                f'<text x="{self._left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
            )
        for tick in ticks(0.0, self._x_end):
            x = self.x(tick)
            parts.append(
                f'<text x="{x:.1f}" y="{self._bottom + 18:.1f}" text-anchor="middle">{tick:g}</text>'
            )
        middle = (self._left + self._right) / 2
        parts.append(
            f'<path d="M{self._left:.1f} {self._bottom:.1f}H{self._right:.1f}" stroke="#222222"/>'
            f'<text x="{middle:.1f}" y="{self._bottom + 40:.1f}" text-anchor="middle">{escape(label)}</text>'
        )
        return parts

    def line(self, line: Line, color: str, width: float) -> str:
        points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in line)
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'


def _legend(names: Sequence[str], *, mean: bool) -> list[str]:
    entries = [(name, COLORS[i % len(COLORS)], 1.6) for i, name in enumerate(names)]
    if mean:
        entries.append(("mean", MEAN_COLOR, 3.0))
    parts, x = [], WIDTH - 24.0 - 86 * len(entries)
    for name, color, width in entries:
        parts.append(
            f'<path d="M{x:.0f} 20h22" stroke="{color}" stroke-width="{width:g}"/>'
            f'<text x="{x + 28:.0f}" y="24">{escape(name)}</text>'
        )
        x += 86
    return parts
