"""What is installed, as configuration classes: for the JSON Schema and the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import keys_of, table_name
from .config.schema import json_schema
from .plugins import Catalogue, PluginSession

_WITH_TABLES = ("algorithms", "trainables", "optimizers", "schedules", "losses", "sinks", "hooks", "backends")
_NAMED_BY = {
    "algorithms": "run.algorithm",
    "trainables": "training.trainable",
    "optimizers": "training.optimizer",
    "schedules": "training.lr_scheduler",
    "sinks": "metrics.sinks",
}


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
        for key, kind in registered.component.selects.items():
            choices[f"{table}.{key}"] = _summaries(session, kind)
    return choices


def installed_schema() -> dict[str, Any]:
    """The JSON Schema of run files with everything that is installed now."""
    session = PluginSession(Catalogue.installed())
    return json_schema(installed_classes(session), installed_choices(session))


def _summaries(session: PluginSession, kind: str) -> dict[str, str]:
    return {r.component.name: r.component.summary for r in session.components(kind)}
