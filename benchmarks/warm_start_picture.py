"""The picture of `benchmarks.warm_start`: solved held-out scenarios by stage, and during agentic GRPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from .learning_picture import COLORS, MEAN_COLOR, mean, ticks

WIDTH, HEIGHT = 900, 380
TOP, BOTTOM, LEFT, GAP = 56, 324, 60, 70
PANEL = (WIDTH - LEFT - GAP - 24) / 2


def draw(data: Mapping[str, Any]) -> str:
    """The picture of the JSON of `benchmarks.warm_start`."""
    runs = data["runs"]
    right = LEFT + PANEL + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="#222222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{escape(data["example"])}: held-out scenarios solved</text>',
        *_legend([f"seed {run['seed']}" for run in runs]),
        *_scale(LEFT),
        *_bars(runs),
        *_scale(right),
        *_curves([run["curve"] for run in runs], right),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _y(share: float) -> float:
    return BOTTOM - share * (BOTTOM - TOP)


def _scale(left: float) -> list[str]:
    return [
        f'<path d="M{left:.1f} {_y(tick):.1f}H{left + PANEL:.1f}" stroke="#dddddd"/>'
        f'<text x="{left - 8:.1f}" y="{_y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in ticks(0.0, 1.0)
    ]


def _bars(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A group of bars a stage, a bar a seed, and a line at their mean."""
    stages = list(runs[0]["stages"])
    slot = PANEL / len(stages)
    width = slot * 0.7 / len(runs)
    parts = []
    for number, stage in enumerate(stages):
        left = LEFT + number * slot + slot * 0.15
        shares = [run["stages"][stage]["eval/reward"] for run in runs]
        for index, share in enumerate(shares):
            parts.append(
                f'<rect x="{left + index * width:.1f}" y="{_y(share):.1f}" width="{width - 2:.1f}"'
                f' height="{BOTTOM - _y(share):.1f}" fill="{COLORS[index % len(COLORS)]}"/>'
            )
        average = sum(shares) / len(shares)
        middle = left + slot * 0.35
        parts.append(
            f'<path d="M{left - 4:.1f} {_y(average):.1f}h{slot * 0.7 + 6:.1f}" stroke="{MEAN_COLOR}"'
            ' stroke-width="3"/>'
            f'<text x="{middle:.1f}" y="{_y(max(shares)) - 8:.1f}" text-anchor="middle">{average:.2f}</text>'
            f'<text x="{middle:.1f}" y="{BOTTOM + 18}" text-anchor="middle" font-size="12">'
            f"{escape(stage)}</text>"
        )
    return parts


def _curves(curves: Sequence[Sequence[tuple[int, float]]], left: float) -> list[str]:
    """Share by update, a line a seed, and their mean."""
    last = max(update for curve in curves for update, _ in curve) or 1

    def line(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
        text = " ".join(f"{left + x / last * PANEL:.1f},{_y(y):.1f}" for x, y in points)
        return f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'

    parts = [
        f'<text x="{left + tick / last * PANEL:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        for tick in ticks(0.0, float(last))
    ]
    parts.append(
        f'<text x="{left + PANEL / 2:.1f}" y="{BOTTOM + 40}" text-anchor="middle">'
        "updates of agentic GRPO</text>"
    )
    parts += [line(curve, COLORS[index % len(COLORS)], 1.6) for index, curve in enumerate(curves)]
    if len(curves) > 1:
        parts.append(line(mean(curves), MEAN_COLOR, 3.0))
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    entries = [*((name, COLORS[i % len(COLORS)]) for i, name in enumerate(names)), ("mean", MEAN_COLOR)]
    left = WIDTH - 24.0 - 86 * len(entries)
    return [
        f'<path d="M{left + 86 * index:.0f} 20h22" stroke="{color}" stroke-width="3"/>'
        f'<text x="{left + 86 * index + 28:.0f}" y="24">{escape(name)}</text>'
        for index, (name, color) in enumerate(entries)
    ]
