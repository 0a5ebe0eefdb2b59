"""Fixtures of the tests of plugin loading."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def session() -> Callable[..., object]:
    """A new plugin session over what is installed now."""
    from retrograd.plugins import Catalogue, PluginSession

    def make(disable: tuple[str, ...] = ()) -> PluginSession:
        return PluginSession(Catalogue.installed(disable))

    return make
