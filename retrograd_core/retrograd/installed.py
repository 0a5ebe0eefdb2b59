"""What is installed, as configuration classes: for the JSON Schema and the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from retrograd_hookspecs import ComponentTable

from .config import keys_of, table_name
from .config.keys import optional_arms
from .config.schema import json_schema
from .plugins import Catalogue, PluginSession

_WITH_TABLES = (
    "algorithms",
    "trainables",
    "optimizers",
    "schedules",
    "losses",
    "rewards",
    "sinks",
    "hooks",
    "backends",
)
_NAMED_BY = {
    "algorithms": "run.algorithm",
    "trainables": "training.trainable",
    "optimizers": "training.optimizer",
    "schedules": "training.lr_scheduler",
    "sinks": "metrics.sinks",
}


_WITH_REST = ("rewards",)
"""Kinds that are named by `name:rest` as well, so that their names are no complete list."""


def installed_classes(session: PluginSession) -> dict[str, type[Any]]:
    """Configuration class of every installed component by its table: `{"sft": …, "optimizer.adamw": …}`."""
    classes: dict[str, type[Any]] = {}
    for kind in _WITH_TABLES:
        for registered in session.components(kind):
            component = registered.component
            name = table_name("hooks" if kind == "backends" else kind, component)
            if name is not None and keys_of(component.config):
                classes[name] = component.config
    return classes


def installed_choices(session: PluginSession) -> dict[str, Mapping[str, str]]:
    """For each key that names a component: the names that are installed, with their summaries."""
    choices: dict[str, Mapping[str, str]] = {}
    for kind, key in _NAMED_BY.items():
        choices[key] = _summaries(session, kind)
    for registered in session.components("algorithms"):
        table = table_name("algorithms", registered.component)
        nested = {
            k.name for k in keys_of(registered.component.config) if ComponentTable in optional_arms(k.type)
        }
        for key, kind in registered.component.selects.items():
            if key not in nested and kind not in _WITH_REST:
                choices[f"{table}.{key}"] = _summaries(session, kind)
    return choices


def installed_variants(session: PluginSession) -> dict[str, Mapping[str, type[Any]]]:
    """For each sub-table that a component reads: the class of every component that is installed."""
    variants: dict[str, Mapping[str, type[Any]]] = {}
    for registered in session.components("algorithms"):
        component = registered.component
        table = table_name("algorithms", component)
        for key in keys_of(component.config):
            if ComponentTable in optional_arms(key.type):
                variants[f"{table}.{key.name}"] = component_classes(session, component.selects[key.name])
    return variants


def component_classes(session: PluginSession, kind: str) -> dict[str, type[Any]]:
    """Configuration class of every component of a kind by its name."""
    return {r.component.name: r.component.config for r in session.components(kind)}


def installed_schema(files: Iterable[Path] = ()) -> dict[str, Any]:
    """The JSON Schema of run files with everything that is installed now, and with local hook `files`.

    Raises: `PluginError` for a file that cannot be loaded.
    """
    session = PluginSession(Catalogue.installed())
    for path in files:
        session.load_file(path)
    return json_schema(installed_classes(session), installed_choices(session), installed_variants(session))


def _summaries(session: PluginSession, kind: str) -> dict[str, str]:
    return {r.component.name: r.component.summary for r in session.components(kind)}
