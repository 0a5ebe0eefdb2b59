"""TensorBoard event files read back record by record."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from retrograd_hookspecs import BuildContext, ConfigError, NoConfig
from retrograd_plugins.sinks.tensorboard import TensorBoardSink, retrograd_sinks


def events(directory: Path) -> Iterator[Any]:
    """TFRecord framing: length (8), its CRC (4), the record, its CRC (4)."""
    for path in sorted(directory.glob("events.out.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            yield event
            at += 16 + length


def scalars(directory: Path) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(directory)
        for value in event.summary.value
    ]


def test_scalars_are_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "runs")
    sink.write(1, {"train/loss": 2.5, "train/lr": 0.25})
    sink.write(2, {"train/loss": math.nan})
    sink.close()
    sink.close()
    found = scalars(tmp_path / "runs")
    assert found[:2] == [(1, "train/loss", 2.5), (1, "train/lr", 0.25)]
    assert found[2][:2] == (2, "train/loss")
    assert math.isnan(found[2][2])


def test_resume_marks_where_later_points_are_hidden(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write(step, {"x": 1.0})
    first.close()
    second = TensorBoardSink(tmp_path)
    second.resume(2)
    second.write(3, {"x": 2.0})
    second.close()
    starts = [e.step for e in events(tmp_path) if e.session_log.status == SessionLog.START]
    assert starts == [3]


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "runs")
    sink.resume(1)
    sink.close()
    assert not (tmp_path / "runs").exists()


def test_component(tmp_path: Path) -> None:
    (component,) = retrograd_sinks()
    assert (component.extra, component.requires) == ("tensorboard", ("tensorboardX",))

    def context(directory: Path | None) -> BuildContext:
        metrics = SimpleNamespace(tensorboard_dir=directory)
        return BuildContext(config=SimpleNamespace(metrics=metrics), base_dir=tmp_path)

    sink = component.build(NoConfig(), context(tmp_path))
    sink.write(1, {"x": 1.0})
    sink.close()
    assert scalars(tmp_path) == [(1, "x", 1.0)]
    with pytest.raises(ConfigError, match=r"metrics\.tensorboard_dir"):
        component.build(NoConfig(), context(None))
