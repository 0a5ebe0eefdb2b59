"""The cases at growing context as SVG: time a token and peak memory, each with the straight line nearest to
it.

`python -m benchmarks` writes it beside its report; `python -m benchmarks.context_picture REPORT.json
PICTURE.svg` draws it again from a report.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from .cases import CONTEXT_CASE
from .learning_picture import BOTTOM, COLORS, GAP, HEIGHT, LEFT, MEAN_COLOR, PANEL, TOP, WIDTH, Frame

OURS = "retrograd"

Points = Sequence[tuple[float, float]]


def draw(data: Mapping[str, Any]) -> str:
    """The picture of a report's JSON (`benchmarks.tables.to_json`); "" if two contexts were not measured."""
    time_points, memory_points = points(data)
    if len(time_points) < 2:
        return ""
    panels = (
        (LEFT, time_points, "milliseconds a token", line_of(time_points)),
        (LEFT + PANEL + GAP, memory_points, "peak memory in MB", line_of(memory_points)),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="#222222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for left, measured, title, (start, slope) in panels:
        end = max(x for x, _ in measured)
        straight = [(0.0, start), (end, start + slope * end)]
        top = max(y for _, y in [*measured, *straight])
        frame = Frame(left, TOP, left + PANEL, HEIGHT - BOTTOM, [measured], 0.0, top)
        per = f"{start:.3g} + {1000 * slope:.3g} per 1,000 tokens of context"
        parts += [
            f'<text x="{left:.0f}" y="24" font-size="16">{escape(title)}</text>',
            f'<text x="{left:.0f}" y="44">line: {escape(per)}</text>',
            *frame.axes("tokens of context"),
            frame.line(straight, MEAN_COLOR, 1.2),
            *(
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4.5" fill="{COLORS[0]}"/>'
                for x, y in measured
            ),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def points(data: Mapping[str, Any]) -> tuple[Points, Points]:
    """Milliseconds a token, and peak memory in MB, by tokens of context: medians over the rounds."""
    found = {
        float(summary["case"].rpartition("/")[2]): summary
        for summary in data["summaries"]
        if summary["case"].startswith(CONTEXT_CASE) and summary["contestant"] == OURS and summary["rate"]
    }
    contexts = sorted(found)
    return (
        [(context, 1000 / found[context]["rate"]["median"]) for context in contexts],
        [(context, found[context]["peak_mb"]["median"]) for context in contexts],
    )


def line_of(measured: Points) -> tuple[float, float]:
    """Start and slope of the straight line nearest to the points (least squares)."""
    slope, start = np.polyfit(*zip(*measured, strict=True), 1)
    return float(start), float(slope)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_picture", description=__doc__)
    parser.add_argument("report", type=Path, help="benchmarks.json of a run with the cases context/*")
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    picture = draw(json.loads(arguments.report.read_text()))
    if not picture:
        parser.error(f"{arguments.report} does not hold two cases named {CONTEXT_CASE}*")
    arguments.picture.write_text(picture)


if __name__ == "__main__":
    main()
