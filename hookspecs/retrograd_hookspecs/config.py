"""How a component declares its TOML keys: one attrs class, one `key(...)` a key.

Minimal example::

    @attrs.frozen(kw_only=True)
    class SgdConfig:
        momentum: float = key(0.0, minimum=0.0, below=1.0, doc="Momentum coefficient.")

The type annotation is enforced strictly: `7.9` is not an `int`, `"false"` is not a `bool`, and a
string is not a list. `Literal[...]` lists the accepted values. A `Path` key is resolved against
the directory of the TOML file; so is a `str` key with `locator=True`, unless it begins with a
scheme (`pypi:…`, `hf:…`). Nested attrs classes are sub-tables, tuples of them arrays of tables. A
validator of the class (`@momentum.validator`) raises ValueError with a message about its key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs

METADATA_KEY = "retrograd"


@attrs.frozen(kw_only=True)
class KeyInfo:
    """Documentation and bounds of one TOML key. Bounds apply to numbers, `above`/`below` exclude."""

    doc: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    default_text: str = ""
    """What the reference prints as default where the value alone would not tell ("model context")."""
    locator: bool = False
    """A `str` that names a file or model: a path, or `scheme:rest`, which stays as it is."""
    secret: bool = False
    """The value may hold a credential: it is never written to `resolved.toml` nor shown in a message."""
    excluded_by: str = ""
    """Another key of the table: this one is refused where both are given."""
    input: bool = False
    """A `Path` that must exist when a run starts. What the file holds, not its name, decides whether a
    checkpoint can be resumed: the component that reads it has a hash of it in its `signature()`."""
    may_grow: bool = False
    """An integer that says no more than when a run ends: a resumed run may have a larger one, and does what
    one that had it from the start would have done."""


@attrs.frozen
class ComponentTable:
    """A sub-table that another component reads: `[grpo.judge]` with `type = "ruler"`.

    A key of this type is named in `Component.selects` with the kind of component. `type` names the component,
    whose own class reads the other keys of the sub-table: those of a third party's component stand in the
    same place as those of a built-in one. It is built with `context.build(kind, table.type)`.
    """

    type: str


class ConfigTable(Protocol):
    """A TOML table as the user wrote it, for `Component.check`."""

    @property
    def name(self) -> str:
        """Dotted name, "lora" or "agent.judge"."""

    def where(self, key: str = "") -> str:
        """`file:line` of a key, or of the table for "" and for a key that is not given."""

    def table(self, key: str) -> ConfigTable:
        """A sub-table, given or not."""

    def __contains__(self, key: object) -> bool:
        """True if the user gave the key; a default does not count."""


def key(
    default: Any = attrs.NOTHING,
    *,
    doc: str,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    default_text: str = "",
    locator: bool = False,
    secret: bool = False,
    excluded_by: str = "",
    input: bool = False,
    may_grow: bool = False,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """Declare one TOML key of an attrs configuration class. Without a default it is required."""
    info = KeyInfo(
        doc=doc,
        unit=unit,
        minimum=minimum,
        maximum=maximum,
        above=above,
        below=below,
        default_text=default_text,
        locator=locator,
        secret=secret,
        excluded_by=excluded_by,
        input=input,
        may_grow=may_grow,
    )
    if factory is not None:
        return attrs.field(factory=factory, metadata={METADATA_KEY: info})
    return attrs.field(default=default, metadata={METADATA_KEY: info})


def key_info(attribute: attrs.Attribute[Any]) -> KeyInfo | None:
    """The `KeyInfo` of an attrs attribute, or None for a field that is not a TOML key."""
    return attribute.metadata.get(METADATA_KEY)
