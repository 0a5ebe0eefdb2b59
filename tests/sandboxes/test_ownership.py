"""What may be removed: containers and directories of processes that are gone for certain."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import anyio
import pytest

from retrograd_plugins.sandboxes._local import PREFIX, LocalSandboxes
from retrograd_plugins.sandboxes._ownership import (
    HOST,
    PID,
    STARTED,
    Owner,
    host_name,
    is_abandoned,
    namespace,
    start_time,
)
from retrograd_plugins.sandboxes.local import LocalSandboxConfig

NAME, BOOT, NAMESPACE = host_name().split("/")
GONE = {PID: str(2**22 + 1), STARTED: "1"}
"""A process id above the highest that Linux gives."""


def test_a_process_that_lives_keeps_its_own() -> None:
    assert not is_abandoned(Owner().labels())
    assert is_abandoned({**Owner().labels(), STARTED: "1"}), "its id was used again"


@pytest.mark.parametrize(
    ("host", "abandoned"),
    [
        (f"{NAME}/{BOOT}/{NAMESPACE}", True),
        (f"{NAME}/an-earlier-boot/{NAMESPACE}", True),
        (f"{NAME}/an-earlier-boot/1", True),
        (
            f"{NAME}/{BOOT}/1",
            False,
        ),  # in a container with this host's name, where the id means another process
        (f"another/{BOOT}/{NAMESPACE}", False),
        (f"{NAME}/{BOOT}", False),
        ("", False),
    ],
)
def test_a_process_that_is_not_there(host: str, abandoned: bool) -> None:
    assert is_abandoned({**GONE, HOST: host}) == abandoned


def test_labels_that_are_no_owner() -> None:
    assert not is_abandoned({})
    assert not is_abandoned({HOST: host_name(), PID: "x", STARTED: ""})
    assert not is_abandoned({HOST: host_name(), PID: "", STARTED: str(os.getpid())})


def test_directories_of_processes_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    me, started = os.getpid(), start_time(os.getpid())
    gone = f"{PREFIX}-{namespace()}-{GONE[PID]}-1-x"
    kept = [
        f"{PREFIX}-{namespace()}-{me}-{started}-x",
        f"{PREFIX}-1-{GONE[PID]}-1-x",  # of another namespace
        f"{PREFIX}-mine",
    ]
    for name in (gone, *kept):
        (tmp_path / name / "work").mkdir(parents=True)

    async def findings() -> list[str]:
        return [found.message for found in await LocalSandboxes(LocalSandboxConfig()).prepare()]

    assert "removed 1 directories that runs left which are gone" in anyio.run(findings)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
