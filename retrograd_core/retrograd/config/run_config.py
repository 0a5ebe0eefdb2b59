"""The whole configuration of a run: shared sections as objects, the tables of components as written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs

from retrograd_hookspecs import Problem

from .document import Document, RawTable, join_key, split_key
from .keys import keys_of
from .report import raise_problems
from .scanner import KeyPath
from .sections import (
    NAMED_TABLES,
    OPTIONAL_SECTIONS,
    SHARED_SECTIONS,
    CheckpointConfig,
    EvaluationConfig,
    MetricsConfig,
    ModelConfig,
    ObserveConfig,
    OutputConfig,
    PluginsConfig,
    ReferenceConfig,
    RunSection,
    TrainingConfig,
)
from .shape import RunShape
from .structure import Structured, read_table


@attrs.frozen(kw_only=True)
class RunConfig:
    """A valid configuration. Sections that may be left out are None if they are."""

    run: RunSection
    model: ModelConfig
    output: OutputConfig
    training: TrainingConfig
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig | None = None
    metrics: MetricsConfig = attrs.field(factory=MetricsConfig)
    observe: ObserveConfig | None = None
    reference: ReferenceConfig | None = None
    plugins: PluginsConfig = attrs.field(factory=PluginsConfig)
    document: Document = attrs.field(eq=False, repr=False)
    shape: RunShape = attrs.field(factory=RunShape, eq=False, repr=False)
    """What the selected components declare, for the `check` of another one."""

    @property
    def base_dir(self) -> Path:
        """Directory of the file; relative paths in it resolve against this."""
        return self.document.base_dir

    @property
    def source(self) -> str:
        """Name of the file, or `Trainer(...)`."""
        return self.document.name

    @property
    def tables(self) -> Mapping[str, RawTable]:
        """The tables of components that the file holds: "sft", "lora", "optimizer.muon"."""
        return {join_key(path): RawTable(self.document, path) for path in component_paths(self.document)}

    def table(self, name: str) -> RawTable:
        """The table of a component, given or not."""
        return self.document.table(name)


class UnknownValueError(Exception):
    """A value that a rule asks for is not known, because the file gives it wrongly or not at all."""


@attrs.frozen(kw_only=True)
class SharedSections:
    """The shared sections as read, with whatever is wrong in them: what rules look at."""

    document: Document
    sections: Mapping[str, Structured[Any]]

    @property
    def problems(self) -> list[Problem]:
        """Every problem inside a section."""
        return [problem for section in self.sections.values() for problem in section.problems]

    def value(self, key: str) -> Any:
        """The accepted value or default of a dotted key.

        Raises:
            UnknownValueError: its section is left out, or the key is missing or was refused.
        """
        section, _, name = key.partition(".")
        found = self.sections.get(section)
        if found is None or name not in found.keys:
            raise UnknownValueError(key)
        return found.keys[name]

    def given(self, key: str) -> bool:
        """True if the file gives the key or section, rightly or wrongly."""
        return self.document.value(split_key(key)) is not None

    def where(self, key: str) -> str:
        """`file:line` of a dotted key."""
        return self.document.where(key)

    def places(self, *keys: str) -> str:
        """` (line 4, line 5)`: where those of the keys are that the file gives, to end a message."""
        prefix = f"{self.document.name}:"
        found = [self.where(key) for key in keys if self.given(key)]
        shown = [
            f"line {where.removeprefix(prefix)}" if where.startswith(prefix) else where for where in found
        ]
        return f" ({', '.join(dict.fromkeys(shown))})" if shown else ""

    def problem(self, key: str, message: str, hint: str = "") -> Problem:
        """A problem of a key, at its line."""
        return Problem(where=self.where(key), key=key, message=message, hint=hint)

    def config(self, extra: Iterable[Problem] = (), *, shape: RunShape | None = None) -> RunConfig:
        """The configuration.

        Args:
            extra: further problems, reported together with those of the sections.
            shape: what the selected components declare. Where the algorithm fixes accumulation,
                gradient_accumulation becomes ctx / micro_batch.

        Raises:
            ConfigError: there is any problem.
        """
        raise_problems([*self.problems, *extra])
        values: dict[str, Any] = {name: section.value for name, section in self.sections.items()}
        shape = shape or RunShape()
        if shape.fixed_accumulation:
            training = cast(TrainingConfig, values["training"])
            values["training"] = attrs.evolve(
                training, gradient_accumulation=training.ctx // training.micro_batch
            )
        return RunConfig(document=self.document, shape=shape, **values)


def read_shared(document: Document, *, absent: Mapping[str, Any] | None = None) -> SharedSections:
    """Read the shared sections. Problems are kept, so that all of a file can be reported together.

    `absent` holds objects for required sections that the document may leave out, for commands that
    need a model and train nothing: `{"run": RunSection(algorithm="")}`.
    """
    elsewhere: dict[str, list[str]] = {}
    for name, cls in SHARED_SECTIONS.items():
        for key in keys_of(cls):
            elsewhere.setdefault(key.name, []).append(name)
    sections: dict[str, Structured[Any]] = {}
    for name, cls in SHARED_SECTIONS.items():
        table = document.table(name)
        if not table.given and absent is not None and name in absent:
            values = {key.name: getattr(absent[name], key.name) for key in keys_of(cls)}
            sections[name] = Structured(value=absent[name], keys=values, problems=())
        elif table.given or name not in OPTIONAL_SECTIONS:
            sections[name] = read_table(cls, table, elsewhere=elsewhere)
    return SharedSections(document=document, sections=sections)


def component_paths(document: Document) -> list[KeyPath]:
    """Paths of what belongs to components: `("sft",)`, `("optimizer", "muon")`."""
    paths: list[KeyPath] = []
    for section, value in document.values.items():
        if section in SHARED_SECTIONS:
            continue
        if section in NAMED_TABLES and isinstance(value, Mapping):
            paths.extend((section, name) for name in value)
        else:
            paths.append((section,))
    return paths
