"""The image of sandboxes: there, pulled, or built; and which one it is exactly."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

from retrograd_hookspecs import RolloutError

from ._docker import Engine, EngineRefusedError

Status = Callable[[str], None]


async def require_image(engine: Engine, image: str, dockerfile: str, status: Status) -> str:
    """Make sure that the image is there; its digest.

    Args:
        dockerfile: builds the image where it is missing; "" pulls it.
        status: is told how that goes.

    Raises: `RolloutError` with what the engine said.
    """
    import anyio
    import anyio.to_thread

    stopped = threading.Event()

    def work() -> str:
        return _require(engine, image, dockerfile, status, stopped)

    try:
        # Given up at once: a download may be slow, and the engine drops it with the connection.
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
    finally:
        stopped.set()


def _require(engine: Engine, image: str, dockerfile: str, status: Status, stopped: threading.Event) -> str:
    digest = find_image(engine, image)
    if digest is not None:
        return digest
    if dockerfile:
        with engine.reporting(f"cannot build the image {image}"):
            steps = engine.api.build(
                fileobj=io.BytesIO(dockerfile.encode()), tag=image, rm=True, forcerm=True, decode=True
            )
            _follow(steps, f"building {image}", status, stopped)
    elif _is_local(image):
        raise RolloutError(
            f"the image {image} is not in the container engine at {engine.host}, and its name is that of no"
            " registry; build or load it there, or set `image` to one that can be pulled"
        )
    else:
        from docker.utils import parse_repository_tag

        repository, tag = parse_repository_tag(image)
        with engine.reporting(f"cannot pull the image {image}"):
            steps = engine.api.pull(repository, tag=tag or "latest", stream=True, decode=True)
            _follow(steps, f"pulling {image}", status, stopped)
    status("")
    digest = find_image(engine, image)
    if digest is None:
        raise RolloutError(f"the container engine does not have the image {image} after pulling it")
    return digest


def find_image(engine: Engine, image: str) -> str | None:
    """The digest of an image: its registry's, else the engine's id. None if it is not there. Blocks."""
    try:
        with engine.reporting(f"cannot look for the image {image}"):
            found = engine.api.inspect_image(image)
    except EngineRefusedError as error:
        if error.status == 404:
            return None
        raise
    repository = image.partition("@")[0]
    for digest in sorted(found.get("RepoDigests") or []):
        name, _, value = digest.partition("@")
        if repository == name or repository.startswith(f"{name}:"):
            return str(value)
    return str(found["Id"])


def image_path(engine: Engine, image: str) -> str:
    """`PATH` of an image; blocks."""
    with engine.reporting(f"cannot look at the image {image}"):
        variables = (engine.api.inspect_image(image).get("Config") or {}).get("Env") or []
    values = [value.partition("=")[2] for value in variables if value.startswith("PATH=")]
    return values[0] if values else "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _is_local(image: str) -> bool:
    return image.startswith(("localhost/", "sha256:"))


def _follow(steps: Iterator[Any], what: str, status: Status, stopped: threading.Event) -> None:
    """Pass progress on. Raises: `RolloutError` for an error in the stream."""
    layers: dict[str, tuple[int, int]] = {}
    for step in steps:
        if stopped.is_set():
            steps.close()  # type: ignore[attr-defined]
            return
        if "error" in step:
            raise RolloutError(f"failed {what}: {' '.join(str(step['error']).split())}")
        detail = step.get("progressDetail") or {}
        if "id" in step and detail.get("total"):
            layers[step["id"]] = (int(detail.get("current", 0)), int(detail["total"]))
            done, total = (sum(values) for values in zip(*layers.values(), strict=True))
            status(f"{what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        elif line := str(step.get("stream") or "").strip():
            status(f"{what}: {line[:100]}")
