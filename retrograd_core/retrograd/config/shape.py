"""What the components of a run declare about its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from retrograd_hookspecs import Component, PluginError, Problem

from .document import Document
from .keys import keys_of
from .messages import quote
from .sections import NAMED_TABLES
from .structure import Structured, read_table

if TYPE_CHECKING:
    from .run_config import RunConfig


def _nothing(kind: str) -> Sequence[Component[Any, Any]]:
    return ()


@attrs.frozen(kw_only=True)
class RunShape:
    """What rules need to know about the selected components. `of` makes it from them."""

    algorithm: str = ""
    """Name of the algorithm; "" while it is not known, for then no section can be called stray."""
    trainable: str = ""
    sections: Mapping[str, str] = attrs.field(factory=dict)
    """Component tables that apply, each with what selects it: `{"sft": 'run.algorithm is "sft"'}`."""
    required: frozenset[str] = frozenset()
    """Those of them that the file must hold although all their keys have defaults."""
    applies: frozenset[str] = frozenset()
    """Shared sections out of "evaluation", "observe", "reference" that the algorithm reads."""
    reads: frozenset[str] = frozenset()
    """Conditional shared keys that some component reads; see `rules.CONDITIONAL_KEYS`."""
    fixed_accumulation: bool = False
    starts_from: str = ""
    """Dotted key that names a file which the trainable starts from: "lora.init_adapter"."""
    output_kinds: tuple[str, ...] = ()
    """What `output.kind` may be; empty if anything."""
    frozen_base: bool = False
    """The base weights stay as they are."""
    installed: Callable[[str], Sequence[Component[Any, Any]]] = attrs.field(default=_nothing, eq=False)
    """All components of a kind that are installed, to explain a mistake."""

    @classmethod
    def of(
        cls,
        components: Iterable[tuple[str, Component[Any, Any]]],
        installed: Callable[[str], Sequence[Component[Any, Any]]] = _nothing,
    ) -> RunShape:
        """The shape of a run made of `(kind, component)` pairs."""
        names: dict[str, str] = {}
        sections: dict[str, str] = {}
        required: set[str] = set()
        applies: set[str] = set()
        reads: set[str] = set()
        fixed = False
        trainable: dict[str, Any] = {}
        for kind, component in components:
            names[kind] = component.name
            reads.update(component.reads)
            if kind == "algorithms":
                applies.update(component.applies)
                fixed = component.fixed_accumulation
            table = table_name(kind, component)
            if kind == "trainables":
                starts_from = f"{table}.{component.starts_from}" if component.starts_from else ""
                trainable = {
                    "starts_from": starts_from,
                    "output_kinds": component.output_kinds,
                    "frozen_base": component.frozen_base,
                }
            if table is None:
                continue
            sections[table] = _selection(kind, component.name)
            if kind in _SECTION_KINDS and not any(key.required for key in keys_of(component.config)):
                required.add(table)
        return cls(
            algorithm=names.get("algorithms", ""),
            trainable=names.get("trainables", ""),
            sections=sections,
            required=frozenset(required),
            applies=frozenset(applies),
            reads=frozenset(reads),
            fixed_accumulation=fixed,
            installed=installed,
            **trainable,
        )


def table_name(kind: str, component: Component[Any, Any]) -> str | None:
    """The TOML table with a component's keys, "sft" or "optimizer.muon"; None if it has none."""
    if kind in _SECTION_KINDS:
        return (component.section or component.name) if keys_of(component.config) else None
    for table, named in NAMED_TABLES.items():
        if kind == named.kind:
            return f"{table}.{component.name}"
    return None


def read_component(kind: str, component: Component[Any, Any], document: Document) -> Structured[Any]:
    """The table of a component, read with its class; one without a table has its defaults.

    Raises:
        PluginError: the component has a required key, but its kind has no table where it could be given.
    """
    name = table_name(kind, component)
    if name is None:
        required = [key.name for key in keys_of(component.config) if key.required]
        if required:
            raise PluginError(
                f"{kind}.{component.name}: the key {required[0]!r} is required, but {kind} have no table of"
                " their own in the TOML: give it a default"
            )
        return Structured(value=component.config(), keys={}, problems=())
    return read_table(component.config, document.table(name))


def check_component(
    component: Component[Any, Any], table: str | None, config: Any, run: RunConfig
) -> list[Problem]:
    """What the component itself finds wrong across the keys of its table."""
    if component.check is None:
        return []
    return list(component.check(config, run.table(table or ""), run))


_SECTION_KINDS = {"algorithms": "run.algorithm", "trainables": "training.trainable"}


def _selection(kind: str, name: str) -> str:
    selector = _SECTION_KINDS.get(kind)
    if selector is None:
        selector = next(named.selector for named in NAMED_TABLES.values() if named.kind == kind)
    return f"{selector} is {quote(name)}"
