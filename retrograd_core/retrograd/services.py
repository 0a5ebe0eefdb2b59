"""The parts of one run, built once each, in the order of their declared needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from retrograd_hookspecs import PluginError

Factory = Callable[["Services"], Any]


class Services:
    """Lazily built parts by name. A factory asks for others through `get`; a cycle is an error."""

    def __init__(self, factories: Mapping[str, Factory]) -> None:
        self._factories = dict(factories)
        self._built: dict[str, Any] = {}
        self._building: list[str] = []

    def extend(self, factories: Mapping[str, Factory]) -> None:
        """Add factories."""
        self._factories.update(factories)

    def get(self, name: str) -> Any:
        """The part `name`. Raises `PluginError` for an unknown name or a cycle of needs."""
        if name in self._built:
            return self._built[name]
        if name in self._building:
            raise PluginError(f"components need each other: {' -> '.join([*self._building, name])}")
        try:
            factory = self._factories[name]
        except KeyError:
            raise PluginError(
                f"a component needs the service {name!r}, which this run does not have"
                f" (it has: {', '.join(sorted(self._factories))})"
            ) from None
        self._building.append(name)
        try:
            self._built[name] = factory(self)
        finally:
            self._building.pop()
        return self._built[name]

    def provide(self, name: str, value: Any) -> None:
        """Set a part that is known only later (the number of steps)."""
        self._built[name] = value
        self._factories.setdefault(name, lambda _: value)

    def select(self, names: tuple[str, ...]) -> dict[str, Any]:
        """The parts a component declared in `needs`."""
        return {name: self.get(name) for name in names}

    def built(self) -> Iterator[tuple[str, Any]]:
        """Parts built so far, in order of building."""
        return iter(self._built.items())
