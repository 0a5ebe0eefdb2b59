"""Finds or starts a container engine, and makes the images of the tests in it.

`start-engine.sh`, `make-image.sh` and `stop-engine.sh` do the work: they install Debian's Docker or Podman,
start it without touching the host's network, and make images of the host's own packages, so that no registry
is needed. They want root, and leave the engine running for the next session.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

import attrs

Kind = Literal["docker", "podman"]
PYTHON_IMAGE = "localhost/sandbox:py"
"""Python, pytest, git, bash."""
BUSYBOX_IMAGE = "localhost/sandbox:busybox"
SCRIPTS = Path(__file__).parent
START_SECS = 600


class NoEngineError(AssertionError):
    """There is no engine, and none could be started; the text says how to get one."""


@attrs.frozen(kw_only=True)
class Engine:
    """An engine that answers."""

    kind: Kind
    host: str
    """As `DOCKER_HOST` has it."""
    state: Path
    """Its state, where it was started by the tests."""

    def stop(self) -> None:
        """Stop it, containers included."""
        run("stop-engine.sh", self.kind, self.state)


def find_or_start(kind: Kind, cache: Path) -> Engine:
    """An engine with the images of the tests.

    Args:
        cache: where its state and the files of images are kept, unless `ENGINE_STATE` and `IMAGE_CACHE` name
            other places. A file system that is an overlay itself makes containers slow.

    Raises: `NoEngineError`.
    """
    state = Path(os.environ.get("ENGINE_STATE") or cache / "container-engine")
    return start(kind, state, Path(os.environ.get("IMAGE_CACHE") or cache / "container-images"))


def start(kind: Kind, state: Path, images: Path | None) -> Engine:
    """Start the engine whose state is there, if it does not run, and make the images. Raises as above."""
    line = run("start-engine.sh", kind, state).splitlines()[-1]
    host = line.partition("=")[2]
    if images is not None:
        run("make-image.sh", kind, state, DOCKER_HOST=host, IMAGE_CACHE=str(images))
    return Engine(kind=kind, host=host, state=state)


def run(script: str, kind: Kind, state: Path, **variables: str) -> str:
    """Output of a script. Raises: `NoEngineError`."""
    environment = {**os.environ, "ENGINE": kind, "ENGINE_STATE": str(state), **variables}
    ended = subprocess.run(
        ["bash", str(SCRIPTS / script)], env=environment, capture_output=True, text=True, timeout=START_SECS
    )
    if ended.returncode:
        said = ended.stderr.strip()[-1500:]
        raise NoEngineError(
            f"these tests need {kind}, and {script} failed: {said}\nRun them as root on Debian or Ubuntu. By"
            f" hand: ENGINE={kind} ENGINE_STATE=DIR bash tests/containers/start-engine.sh, then"
            " ENGINE_STATE=DIR pytest …"
        )
    return ended.stdout
