"""`python -m tests.architecture.reference` writes the tables of docs/configuration.md anew."""

from __future__ import annotations

from pathlib import Path

from retrograd.config import SHARED_SECTIONS
from retrograd.config.reference import update_reference
from retrograd.installed import component_classes, installed_classes
from retrograd.plugins import Catalogue, PluginSession

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def current(text: str) -> str:
    """The text with the tables of every built-in class as they are now."""
    session = PluginSession(Catalogue.installed())
    nested = {
        f"{kind}.{name}": cls
        for kind in ("judges", "environments")
        for name, cls in component_classes(session, kind).items()
    }
    return update_reference(text, {**SHARED_SECTIONS, **installed_classes(session), **nested})


if __name__ == "__main__":
    DOCUMENT.write_text(current(DOCUMENT.read_text()))
