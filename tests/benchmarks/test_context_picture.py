"""The picture of time and memory by tokens of context."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from benchmarks.cases import CONTEXT_CASE
from benchmarks.context_picture import draw, line_of, points

from benchmarks import context_picture

SVG = "{http://www.w3.org/2000/svg}"


def report(*contexts: int, contestant: str = "retrograd") -> dict[str, object]:
    """5 ms and 300 MB, and 1 ms and 23 MB more with each thousand tokens."""

    def spread(value: float) -> dict[str, float]:
        return {"median": value, "low": value, "high": value}

    return {
        "summaries": [
            {
                "case": f"{CONTEXT_CASE}smollm2/{context}",
                "contestant": contestant,
                "rate": spread(1000 / (5 + context / 1000)),
                "peak_mb": spread(300 + 0.023 * context),
            }
            for context in contexts
        ]
    }


def test_lines_are_those_of_the_points() -> None:
    time_points, memory_points = points(report(8192, 256, 1024))
    assert [context for context, _ in time_points] == [256, 1024, 8192]
    assert line_of(time_points) == pytest.approx((5.0, 0.001))
    assert line_of(memory_points) == pytest.approx((300.0, 0.023))


def test_a_picture_has_a_mark_a_context_in_each_panel() -> None:
    root = ET.fromstring(draw(report(256, 1024, 8192)))
    assert len(root.findall(f"{SVG}circle")) == 6
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert "line: 5 + 1 per 1,000 tokens of context" in texts
    assert "line: 300 + 23 per 1,000 tokens of context" in texts


@pytest.mark.parametrize("data", [report(), report(256), report(256, 512, contestant="llama.cpp")])
def test_no_picture_without_two_contexts_of_ours(data: dict[str, object]) -> None:
    assert draw(data) == ""


def test_the_command_draws_a_report_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, picture = tmp_path / "benchmarks.json", tmp_path / "context.svg"
    saved.write_text(json.dumps(report(256, 512)))
    monkeypatch.setattr(sys, "argv", ["context_picture", str(saved), str(picture)])
    context_picture.main()
    assert picture.read_text() == draw(report(256, 512))
    saved.write_text(json.dumps(report(256)))
    with pytest.raises(SystemExit):
        context_picture.main()
