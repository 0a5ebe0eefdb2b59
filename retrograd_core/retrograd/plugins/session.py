"""The plugins of one run: loaded when the run refers to them, registered once, then frozen."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pluggy
from packaging.requirements import InvalidRequirement, Requirement

from retrograd_hookspecs import (
    KINDS,
    PROJECT,
    Component,
    LifecycleHooks,
    PluginError,
    RegistrationHooks,
    RetrogradError,
    SelectionHooks,
)

from .discovery import Catalogue, PluginEntry

_LOCAL = "local file"
_SPECIFICATIONS = (RegistrationHooks, LifecycleHooks, SelectionHooks)


@attrs.frozen(kw_only=True)
class Registered:
    """A component and who registered it."""

    kind: str
    component: Component[Any, Any]
    distribution: str
    version: str


class PluginSession:
    """One run's plugin manager and registry.

    There is no global manager: two runs in one process do not see each other's plugins.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._manager = pluggy.PluginManager(PROJECT)
        for specification in _SPECIFICATIONS:
            self._manager.add_hookspecs(specification)
        self._components: dict[tuple[str, str], Registered] = {}
        self._modules: set[str] = set()
        self._frozen = False

    @property
    def hook(self) -> Any:
        """Caller of lifecycle and selection hooks; what a plugin raises comes through as it is."""
        return self._manager.hook

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call a lifecycle or selection hook. An exception of a plugin, unless it is of retrograd's own tree,
        becomes a `PluginError` that names the hook."""
        try:
            return getattr(self._manager.hook, hook)(**arguments)
        except RetrogradError:
            raise
        except Exception as error:
            failure = PluginError(
                f"{hook}: a hook raised {type(error).__name__}: {error} ({_raised_at(error)})"
            )
            failure.exit_code = 1  # the request was right
            raise failure from error

    def component(self, kind: str, name: str) -> Registered:
        """The component `name` of `kind`, loading its module on first use.

        Raises `PluginError` if it is unknown, offered twice, or broken.
        """
        found = self._components.get((kind, name))
        if found is not None:
            return found
        if self._frozen:
            raise PluginError(f"the run is assembled; {kind}.{name} can no longer be loaded")
        entry = self.catalogue.find(kind, name)
        self._load(entry)
        try:
            return self._components[kind, name]
        except KeyError:
            offered = sorted(n for k, n in self._components if k == kind)
            raise PluginError(
                f"{entry.distribution} {entry.version}: entry point {name!r} of {KINDS[kind].group} names"
                f" {entry.module}, but its {KINDS[kind].hook}() registers no component called {name!r}"
                f" (registered: {', '.join(offered) or 'none'})"
            ) from None

    def names(self, kind: str) -> list[str]:
        """Names of all components of a kind, sorted, local files' included."""
        return sorted({*self.catalogue.names(kind), *(n for k, n in self._components if k == kind)})

    def components(self, kind: str, prefix: str = "") -> list[Registered]:
        """All components of a kind whose name begins with `prefix`, sorted by name."""
        return [self.component(kind, name) for name in self.names(kind) if name.startswith(prefix)]

    def selected_by(self, kind: str, key: str) -> list[Registered]:
        """The components of a kind that the key of a shared section selects, sorted by name."""
        return [found for found in self.components(kind) if found.component.selected_by == key]

    def fallback(self, kind: str) -> Registered:
        """The component of a kind that serves where the run names no other.

        Raises `PluginError` if none says that it does, or more than one.
        """
        found = [registered for registered in self.components(kind) if registered.component.fallback]
        if len(found) == 1:
            return found[0]
        singular = KINDS[kind].singular
        if not found:
            listing = ", ".join(registered.component.name for registered in self.components(kind)) or "none"
            raise PluginError(f"no {singular} that serves by default is installed (installed: {listing})")
        owners = " and ".join(f"{r.component.name!r} ({r.distribution})" for r in found)
        raise PluginError(
            f"more than one {singular} says that it serves by default: {owners}; leave one out in"
            f' [plugins] disable = ["{kind}.{found[-1].component.name}"]'
        )

    def has(self, kind: str, name: str) -> bool:
        """True if `component` would find the name."""
        return (kind, name) in self._components or (kind, name) in self.catalogue.entries

    def load_file(self, path: Path) -> None:
        """Import a local module of hooks (`[plugins] load`)."""
        if not path.is_file():
            raise PluginError(f"[plugins] load: there is no file {path}")
        digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
        name = f"retrograd_local_{path.stem}_{digest}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise PluginError(f"[plugins] load: {path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise PluginError(
                f"[plugins] load: {path} failed to import: {type(error).__name__}: {error}"
            ) from error
        self.register(module, str(path), _LOCAL)

    def register(self, plugin: object, name: str, version: str = "") -> None:
        """Register a module or object of hook implementations and collect its components."""
        if self._frozen:
            raise PluginError(f"the run is assembled; {name} can no longer be registered")
        if self._manager.has_plugin(name):
            raise PluginError(f"{name} is registered already: name it once")
        self._manager.register(plugin, name=name)
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            self._manager.unregister(plugin)  # or every later registration would fail for it too
            raise PluginError(f"{name} {version}: {error}{_nearest_hook(str(error))}") from error
        for kind in KINDS.values():
            caller = getattr(self._manager.hook, kind.hook)
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin:
                    self._collect(kind.name, implementation.function, name, version)

    def freeze(self) -> None:
        """No component can be added from here on."""
        self._frozen = True

    def loaded(self) -> list[Registered]:
        """What this run loaded, sorted by kind and name."""
        return [self._components[key] for key in sorted(self._components)]

    def _load(self, entry: PluginEntry) -> None:
        if entry.module in self._modules:
            return
        try:
            module: ModuleType = importlib.import_module(entry.module)
        except Exception as error:
            raise PluginError(
                f"{entry.distribution} {entry.version}: {entry.module} (entry point {entry.name!r} of"
                f" {KINDS[entry.kind].group}) failed to import: {type(error).__name__}: {error}; mend or"
                f' uninstall it, or set [plugins] disable = ["{entry.distribution}"]'
            ) from error
        self._modules.add(entry.module)
        self.register(module, f"{entry.distribution}:{entry.module}", entry.version)

    def _collect(self, kind: str, function: Any, name: str, version: str) -> None:
        hook = KINDS[kind].hook
        try:
            offered = function()
        except Exception as error:
            raise PluginError(f"{name} {version}: {hook}() raised {type(error).__name__}: {error}") from error
        if isinstance(offered, Component):
            offered = (offered,)
        if not isinstance(offered, Sequence) or not all(isinstance(c, Component) for c in offered):
            raise PluginError(
                f"{name} {version}: {hook}() must return a list of retrograd_hookspecs.Component,"
                f" got {type(offered).__name__}"
            )
        distribution = name.split(":", 1)[0] if version != _LOCAL else name
        for component in offered:
            self._check_config(component, hook, name)
            other = self._components.get((kind, component.name))
            if other is not None:
                raise PluginError(
                    f"the {KINDS[kind].singular} {component.name!r} is registered by {other.distribution}"
                    f" and by {name}; rename one or disable one in [plugins] disable"
                )
            self._components[kind, component.name] = Registered(
                kind=kind, component=component, distribution=distribution, version=version
            )

    def _check_config(self, component: Component[Any, Any], hook: str, name: str) -> None:
        if not (isinstance(component.config, type) and attrs.has(component.config)):
            raise PluginError(
                f"{name}: {hook}(): the config of {component.name!r} must be an attrs class with `key(...)`"
                f" fields, got {component.config!r}"
            )


def _raised_at(error: BaseException) -> str:
    """`file:line` of the innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "unknown place"


def require_packages(registered: Registered) -> None:
    """Raise `PluginError` with the pip line unless every package that the component needs is installed.

    For components that a run uses; the schema and listings show the others too.
    """
    component = registered.component
    for module in component.requires:
        try:
            present = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            present = False
        if not present:
            extra = f"'retrograd[{component.extra}]'" if component.extra else module
            raise PluginError(
                f"{registered.distribution}: {component.name!r} needs the package {module!r}, which is not"
                f" installed: `pip install {extra}`"
            )


def _nearest_hook(message: str) -> str:
    known = [name for spec in _SPECIFICATIONS for name in vars(spec) if name.startswith("retrograd_")]
    for word in re.findall(r"retrograd_\w+", message):
        match = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
        if match and word not in known:
            return f" (did you mean {match[0]!r}?)"
    return ""


def check_requirements(requirements: Iterable[str]) -> list[str]:
    """Messages for `[plugins] require` lines that the installed distributions do not satisfy."""
    from importlib import metadata

    messages: list[str] = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            messages.append(f"{text!r} is not a requirement: {error}")
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            messages.append(f"{requirement.name} is not installed: `pip install '{text}'`")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            messages.append(f"{requirement.name} {version} is installed: `pip install '{text}'`")
    return messages
