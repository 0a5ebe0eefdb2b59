"""Faults of a configuration class that its author should hear of before any user does."""

from __future__ import annotations

from typing import Any

import attrs

from retrograd_hookspecs import key_info

from .document import Document
from .keys import keys_of
from .resolved import to_table
from .structure import read_table


def class_faults(cls: type[Any]) -> list[str]:
    """What is wrong with a configuration class: undocumented keys, defaults that it would refuse.

    For contract tests of components.

    Raises:
        PluginError: a key has an annotation that cannot be resolved, or a type that TOML has not.
    """
    keys = {key.name: key for key in keys_of(cls)}
    faults = [
        f"{field.name}: has neither key(...) nor a default, so no TOML can give it"
        for field in attrs.fields(cls)
        if field.init and field.default is attrs.NOTHING and key_info(field) is None
    ]
    for key in keys.values():
        if not key.info.doc.strip():
            faults.append(f"{key.name}: has no documentation")
        if key.info.excluded_by and key.info.excluded_by not in keys:
            faults.append(f"{key.name}: is excluded by {key.info.excluded_by}, which is no key")
    if not (cls.__doc__ or "").strip():
        faults.append("the class has no docstring, which the schema shows for the table")
    defaults = {key.name: _written(key.default) for key in keys.values() if key.default is not None}
    document = Document.from_values({"defaults": defaults})
    for problem in read_table(cls, document.table("defaults")).problems:
        name = problem.key.removeprefix("defaults.")
        if name not in keys or not keys[name].required:
            faults.append(f"{name}: its own default is refused: {problem.message}")
    return faults


def _written(value: Any) -> Any:
    return to_table(value) if attrs.has(type(value)) else value
