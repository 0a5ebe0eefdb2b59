"""How a component declares its TOML keys: one attrs class, one `key(...)` a key.

Minimal example::

    @attrs.frozen(kw_only=True)
    class SgdConfig:
        momentum: float = key(0.0, minimum=0.0, below=1.0, doc="Momentum coefficient.")

The type annotation is enforced strictly: `7.9` is not an `int`, `"false"` is not a `bool`, and a
string is not a list. `Literal[...]` lists the accepted values. A `Path` key is resolved against
the directory of the TOML file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    )
    if factory is not None:
        return attrs.field(factory=factory, metadata={METADATA_KEY: info})
    return attrs.field(default=default, metadata={METADATA_KEY: info})


def key_info(attribute: attrs.Attribute[Any]) -> KeyInfo | None:
    """The `KeyInfo` of an attrs attribute, or None for a field that is not a TOML key."""
    return attribute.metadata.get(METADATA_KEY)
