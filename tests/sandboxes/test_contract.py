"""What every sandbox promises."""

from __future__ import annotations

import anyio
import pytest

from retrograd.testing.sandboxes import check_sandboxes
from retrograd_plugins.sandboxes._containers import Containers
from retrograd_plugins.sandboxes._local import LocalSandboxes
from retrograd_plugins.sandboxes.container import ContainerSandboxConfig, Limits, Pool
from retrograd_plugins.sandboxes.local import LocalSandboxConfig
from tests.containers.engine import BUSYBOX_IMAGE, PYTHON_IMAGE
from tests.containers.fixtures import Counter


def containers(image: str, reuse: str) -> Containers:
    pool = Pool(max_live=2, reuse=reuse)  # type: ignore[arg-type]
    config = ContainerSandboxConfig(image=image, pool=pool, limits=Limits(memory_mb=256))
    return Containers(config, lambda text: None)


@pytest.mark.parametrize(("image", "reuse"), [(PYTHON_IMAGE, "never"), (BUSYBOX_IMAGE, "workspace")])
def test_docker(docker: Counter, image: str, reuse: str) -> None:
    anyio.run(check_sandboxes, lambda: containers(image, reuse))


def test_podman(podman: Counter) -> None:
    anyio.run(check_sandboxes, lambda: containers(BUSYBOX_IMAGE, "workspace"))


def test_local() -> None:
    anyio.run(check_sandboxes, lambda: LocalSandboxes(LocalSandboxConfig()))
