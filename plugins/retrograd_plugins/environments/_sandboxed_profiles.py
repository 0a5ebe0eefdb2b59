"""Profiles of containers: the default image, where its package cache is, and what makes tools use that."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class Profile:
    """`image` "" has no default; `dockerfile` builds it where it is missing, "" pulls it.

    `offline` are variables for containers without a network.
    """

    image: str = ""
    dockerfile: str = ""
    cache_path: str = "/cache"
    cached: Mapping[str, str] = attrs.field(factory=dict)
    offline: Mapping[str, str] = attrs.field(factory=dict)


PROFILES: Mapping[str, Profile] = {
    "python": Profile(
        image="localhost/retrograd-sandbox:python3.12-1",
        # Git is in it; no public image has pytest, too.
        dockerfile=(
            "FROM docker.io/library/python:3.12-bookworm\n"
            "RUN pip install --no-cache-dir --root-user-action=ignore pytest==8.3.5\n"
            "RUN mkdir -p /work && chmod 1777 /work /tmp\n"
        ),
        cache_path="/cache/pip",
        # pip does not use a cache that it cannot write to; it takes wheels from a folder.
        cached={"PIP_FIND_LINKS": "/cache/pip"},
        offline={"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    ),
    "typescript": Profile(
        image="docker.io/library/node:22-bookworm",
        cache_path="/cache/npm",
        # npm finds nothing in a cache that it cannot write to: a setup copies it to ~/.npm.
        offline={"npm_config_offline": "true", "npm_config_update_notifier": "false"},
    ),
    "custom": Profile(),
}
