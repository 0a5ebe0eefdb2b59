"""From a configuration to the parts of a run: `assemble(document)`.

1. Structure the shared sections strictly. 2. Find the plugins that the file names and load only those.
3. Structure each component's table with its own class. 4. Report every problem together. 5. Build the
parts, in the order of their declared needs, when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from retrograd_hookspecs import (
    KINDS,
    BuildContext,
    Component,
    ComponentTable,
    PluginError,
    Problem,
    RetrogradError,
)

from .config import (
    SHARED_SECTIONS,
    Document,
    OutputConfig,
    RunConfig,
    RunSection,
    RunShape,
    SharedSections,
    check_component,
    check_rules,
    keys_of,
    read_component,
    read_shared,
    read_table,
    table_name,
)
from .config.report import raise_problems
from .config.resolved import to_table
from .config.run_config import UnknownValueError
from .files import file_problems, input_keys
from .plugins import Catalogue, PluginSession, Registered
from .plugins.session import check_requirements, require_packages
from .services import Services

_UNUSED = {"run": RunSection(algorithm=""), "output": OutputConfig(path=Path("unused"))}
"""Stands for the required sections that a command without an algorithm does not read."""


@attrs.frozen(kw_only=True, eq=False)
class Chosen:
    """A component of this run with its structured configuration."""

    kind: str
    """The kind under which `retrograd.config` looks for its table."""
    registered: Registered
    config: Any
    table: str | None
    """Its table: "sft", "optimizer.adamw", "grpo.judge"; None if it has none."""

    @property
    def component(self) -> Component[Any, Any]:
        return self.registered.component


@attrs.frozen(kw_only=True, eq=False)
class Assembly:
    """A checked configuration, its plugins, and the parts that are built from them on demand."""

    config: RunConfig
    document: Document
    session: PluginSession
    chosen: Mapping[tuple[str, str], Chosen]
    services: Services

    def components(self) -> dict[str, Any]:
        """Configuration objects of components by table: `{"sft": …, "optimizer.adamw": …}`."""
        return _by_table(self.chosen)

    def settings(self) -> dict[str, Any]:
        """Every value of the run by dotted key, defaults included; input files and secrets left out."""
        given = self._given()
        inputs = set(input_keys({name: type(config) for name, config in given.items()}))
        return {
            f"{name}.{key}": value
            for name, config in given.items()
            for key, value in to_table(config, secrets=False).items()
            if f"{name}.{key}" not in inputs
        }

    def growing_keys(self) -> list[str]:
        """Dotted keys that a resumed run may raise (`key(..., may_grow=True)`)."""
        return [
            f"{name}.{key.name}"
            for name, config in self._given().items()
            for key in keys_of(type(config))
            if key.info.may_grow
        ]

    def _given(self) -> dict[str, Any]:
        """Configuration objects by table, of shared sections and of components."""
        tables = {name: getattr(self.config, name) for name in SHARED_SECTIONS}
        return {name: config for name, config in (tables | self.components()).items() if config is not None}

    def versions(self) -> dict[str, str]:
        """Version by distribution of everything that the run has loaded."""
        return {item.distribution: item.version for item in self.session.loaded()}

    def one(self, kind: str) -> Chosen:
        """The only chosen component of a kind (algorithm, optimizer, trainable, …)."""
        [found] = [chosen for (chosen_kind, _), chosen in self.chosen.items() if chosen_kind == kind]
        return found

    def build(self, kind: str, name: str, **keys: Any) -> Any:
        """Build a component: from its own table, or from `keys` if given."""
        chosen = self.chosen.get((kind, name))
        if chosen is not None and not keys:
            return build_component(self, chosen.registered, chosen.config)
        registered = usable(self.session, kind, name)
        try:
            config = registered.component.config(**keys)
        except TypeError as error:
            raise PluginError(f"{registered.distribution}: {kind}.{name}: {error}") from error
        return build_component(self, registered, config)


def usable(session: PluginSession, kind: str, name: str) -> Registered:
    """The component, with every package that it needs. Raises `PluginError`."""
    registered = session.component(kind, name)
    require_packages(registered)
    return registered


def _by_table(chosen: Mapping[tuple[str, str], Chosen]) -> dict[str, Any]:
    return {item.table: item.config for item in chosen.values() if item.table is not None}


def build_context(assembly: Assembly, needs: tuple[str, ...] = ()) -> BuildContext:
    """What a component with these needs is built with; the services are built first."""
    return BuildContext(
        config=assembly.config,
        base_dir=assembly.config.base_dir,
        services=assembly.services.select(needs),
        build=assembly.build,
    )


def build_component(assembly: Assembly, registered: Registered, config: Any) -> Any:
    """Call `Component.build` with the services it needs. A failure that is no `RetrogradError` names the
    plugin."""
    component = registered.component
    context = build_context(assembly, component.needs)
    try:
        return component.build(config, context)
    except RetrogradError:
        raise
    except Exception as error:
        raise PluginError(
            f"{registered.distribution} {registered.version}: building the {KINDS[registered.kind].singular}"
            f" {component.name!r} failed: {type(error).__name__}: {error}"
        ) from error


def assemble(document: Document, *, algorithm: bool = True, unread: Collection[str] = ()) -> Assembly:
    """Check a whole configuration and prepare its parts; nothing heavy is loaded yet.

    Without `algorithm` only what loads a model and an adapter is chosen: for commands that train nothing.
    `unread` are keys of input files that the command does not read: they need not be there.

    Raises:
        ConfigError: anything is wrong, with every problem found.
    """
    shared = read_shared(document, absent={} if algorithm else _UNUSED)
    problems: list[Problem] = []
    session = PluginSession(_catalogue(shared, problems))
    for path in _value(shared, "plugins.load", ()):
        where = document.where("plugins.load")
        _collect(problems, where, "plugins.load", partial(session.load_file, path))
    chosen = _Chooser(shared, session, problems).choose(algorithm)
    shape = RunShape.of(
        ((item.kind, item.component) for item in chosen.values()), partial(_installed, session)
    )
    problems += check_rules(shared, shape)
    if not shared.problems:
        config = shared.config(shape=shape)
        for item in chosen.values():
            if item.config is not None:
                problems += check_component(item.component, item.table, item.config, config)
    problems += file_problems(shared, _by_table(chosen), algorithm=algorithm, unread=unread)
    config = shared.config(problems, shape=shape)
    session.call("retrograd_configure", config=config)
    return _parts(document, config, session, chosen)


def component_of(document: Document, kind: str, key: str) -> tuple[str | None, Component[Any, Any]]:
    """The table and the component of a kind that a key of a document names, or its default.

    Raises: `ConfigError` if there is no such component.
    """
    shared = read_shared(document, absent=_UNUSED)
    problems: list[Problem] = []
    session = PluginSession(_catalogue(shared, problems))
    name = _value(shared, key, "")
    if not session.has(kind, name):
        for path in _value(shared, "plugins.load", ()):
            session.load_file(path)
    found = _collect(problems, document.where(key), key, partial(usable, session, kind, name))
    raise_problems([*(problem for problem in shared.problems if problem.key == key), *problems])
    return table_name(kind, found.component), found.component


def trainable_of(document: Document) -> tuple[str | None, Component[Any, Any]]:
    """The table and the component of what a document trains. Raises: `ConfigError` as `component_of`."""
    return component_of(document, "trainables", "training.trainable")


def _installed(session: PluginSession, kind: str) -> list[Component[Any, Any]]:
    """Every component of a kind: those of the run, and those that are not loaded, which stay out of it.
    One that cannot be loaded is left out: it is a run that names it which has to say so."""
    found = {item.component.name: item.component for item in session.loaded() if item.kind == kind}
    apart = PluginSession(session.catalogue)
    for name in session.catalogue.names(kind):
        if name not in found:
            with suppress(PluginError):
                found[name] = apart.component(kind, name).component
    return [found[name] for name in sorted(found)]


def _parts(
    document: Document,
    config: RunConfig,
    session: PluginSession,
    chosen: Mapping[tuple[str, str], Chosen],
) -> Assembly:
    from .parts import factories

    services = Services({})
    assembly = Assembly(config=config, document=document, session=session, chosen=chosen, services=services)
    services.extend(factories(assembly))
    for (kind, name), item in chosen.items():
        if kind == "hooks":
            built = build_component(assembly, item.registered, item.config)
            if built is not None:
                session.register(built, f"{item.registered.distribution}:{name}", item.registered.version)
    return assembly


def _catalogue(shared: SharedSections, problems: list[Problem]) -> Catalogue:
    where = shared.where
    for message in check_requirements(_value(shared, "plugins.require", ())):
        problems.append(Problem(where=where("plugins.require"), key="plugins.require", message=message))
    disable = _value(shared, "plugins.disable", ())
    found = _collect(
        problems, where("plugins.disable"), "plugins.disable", partial(Catalogue.installed, disable)
    )
    return found or Catalogue.installed()


def _value(shared: SharedSections, key: str, default: Any) -> Any:
    try:
        return shared.value(key)
    except UnknownValueError:
        return default


def _collect(problems: list[Problem], where: str, key: str, action: Callable[[], Any]) -> Any:
    """Run an action; a `PluginError` becomes a problem and gives None."""
    try:
        return action()
    except PluginError as error:
        problems.append(Problem(where=where, key=key, message=str(error)))
        return None


class _Chooser:
    """Finds every component that a document names and structures its table."""

    def __init__(self, shared: SharedSections, session: PluginSession, problems: list[Problem]) -> None:
        self._shared = shared
        self._document = shared.document
        self._session = session
        self._problems = problems
        self._chosen: dict[tuple[str, str], Chosen] = {}

    def choose(self, algorithm: bool) -> Mapping[tuple[str, str], Chosen]:
        if algorithm:
            found = self._named("algorithms", "run.algorithm")
            if found is not None:
                self._selected(found)
            self._named("schedules", "training.lr_scheduler")
            self._named("optimizers", "training.optimizer")
            self._sinks()
        self._named("trainables", "training.trainable")
        device = _value(self._shared, "model.device", "auto")
        name = backend_name(self._session, device)
        self.component("backends", name, "model.device")
        self._plugin_tables()
        return self._chosen

    def component(self, kind: str, name: str, key: str, table: str = "") -> Chosen | None:
        """Look a name up and structure its table, or the given sub-table; problems are collected."""
        find = partial(usable, self._session, kind, name)
        registered = _collect(self._problems, self._document.where(key), key, find)
        if registered is None:
            return None
        # A backend's keys are in [plugin.NAME], like those of a hook plugin.
        table_kind = "hooks" if kind == "backends" else kind
        component = registered.component
        if table:
            read = read_table(component.config, self._document.table(table), ignore=("type",))
        else:
            read = read_component(table_kind, component, self._document)
        self._problems += read.problems
        found = Chosen(
            kind=table_kind,
            registered=registered,
            config=read.value,
            table=table or table_name(table_kind, component),
        )
        self._chosen[kind, name] = found
        return found

    def _named(self, kind: str, key: str) -> Chosen | None:
        name = _value(self._shared, key, "")
        return self.component(kind, name, key) if name else None

    def _selected(self, found: Chosen) -> None:
        for key, kind in found.component.selects.items():
            value, dotted = getattr(found.config, key, None), f"{found.table}.{key}"
            if isinstance(value, ComponentTable):
                self.component(kind, value.type, f"{dotted}.type", table=dotted)
            elif isinstance(value, str) and ":" in value:
                name = value.partition(":")[0]
                find = partial(usable, self._session, kind, name)
                _collect(self._problems, self._document.where(dotted), dotted, find)
            elif isinstance(value, str):
                self.component(kind, value, dotted)

    def _sinks(self) -> None:
        for name in _value(self._shared, "metrics.sinks", ()):
            self.component("sinks", name, "metrics.sinks")
        for name in (key.name for key in keys_of(SHARED_SECTIONS["metrics"]) if key.name != "sinks"):
            key = f"metrics.{name}"
            if _value(self._shared, key, None) is not None:
                self._selected_by("sinks", key)

    def _selected_by(self, kind: str, key: str) -> None:
        found = _collect(
            self._problems, self._document.where(key), key, partial(self._session.selected_by, kind, key)
        )
        for registered in found or ():
            self.component(kind, registered.component.name, key)
        if found == []:
            self._problems.append(self._shared.problem(key, f"no installed {KINDS[kind].singular} reads it"))

    def _plugin_tables(self) -> None:
        for name in self._document.table("plugin").values:
            if not self._session.has("backends", name):
                self.component("hooks", name, f"plugin.{name}")
            elif ("backends", name) not in self._chosen:
                message = f"this run uses another backend ({_value(self._shared, 'model.device', 'auto')})"
                where = self._document.where(f"plugin.{name}")
                self._problems.append(Problem(where=where, key=f"plugin.{name}", message=message))


def backend_name(session: PluginSession, device: str) -> str:
    """The backend for `model.device`: what a hook selects; for "auto" a GPU's if there is one, else the one
    that serves by default."""
    available = session.names("backends")
    chosen = session.call("retrograd_select_backend", device=device, available=available)
    if chosen:
        return str(chosen)
    if device in ("auto", "gpu") and not session.has("backends", device):
        gpus = [item.component for item in session.components("backends") if item.component.gpu]
        present = [gpu for gpu in gpus if gpu.present is None or gpu.present()]
        if present or (gpus and device == "gpu"):  # one that is missing says in `build` what it misses
            return (present or gpus)[0].name
        if device == "auto":
            return session.fallback("backends").component.name
    return device
