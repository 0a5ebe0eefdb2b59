"""What is installed, read from entry-point metadata alone: no plugin is imported here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata

import attrs

from retrograd_hookspecs import KINDS, PluginError

PLANNED = {
    "algorithms": ("distill", "preference"),
    "trainables": ("full", "partial", "hybrid"),
    "optimizers": ("muon", "gefen"),
    "backends": ("cuda", "gpu"),
}
"""Names of the reference whose plugins are still to come."""


@attrs.frozen(kw_only=True, order=True)
class PluginEntry:
    """One entry point: `name` of `kind`, offered by a distribution."""

    kind: str
    name: str
    module: str
    distribution: str
    version: str

    @property
    def label(self) -> str:
        return f"{self.kind}.{self.name}"

    def left_out_by(self, name: str) -> bool:
        """True if `name` of `[plugins] disable` is the entry or its distribution."""
        return name == self.label or _normalise(name) == self.distribution

    @classmethod
    def of_point(cls, kind: str, point: metadata.EntryPoint) -> PluginEntry:
        """The entry of an entry point."""
        owner = point.dist
        return cls(
            kind=kind,
            name=point.name,
            module=point.value,
            distribution=_normalise(owner.name) if owner is not None else "",
            version=owner.version if owner is not None else "",
        )


@attrs.frozen
class Catalogue:
    """All installed entries, sorted by kind, name and distribution."""

    entries: Mapping[tuple[str, str], Sequence[PluginEntry]]

    @classmethod
    def installed(cls, disable: Iterable[str] = ()) -> Catalogue:
        """Read the metadata of every installed distribution.

        `disable` leaves out whole distributions (`retrograd-optimizer-lion`) or single entries
        (`optimizers.lion`). Raises `PluginError` for a name that disables nothing.
        """
        groups = {kind.group: kind.name for kind in KINDS.values()}
        found: list[PluginEntry] = []
        seen: set[str] = set()
        for distribution in metadata.distributions():
            name = _normalise(distribution.name or "")
            if name in seen:  # shadowed by an earlier entry of sys.path, as for imports
                continue
            seen.add(name)
            points = [point for point in distribution.entry_points if point.group in groups]
            version = distribution.version if points else ""  # each access parses the metadata anew
            found += [
                PluginEntry(
                    kind=groups[point.group],
                    name=point.name,
                    module=point.value,
                    distribution=name,
                    version=version,
                )
                for point in points
            ]
        return cls.of(found, disable)

    @classmethod
    def of(cls, found: Iterable[PluginEntry], disable: Iterable[str] = ()) -> Catalogue:
        """A catalogue of the given entries; see `installed`."""
        # Built-in entries come first, so that advice names the third party's.
        entries = sorted(set(found), key=lambda e: (e.kind, e.name, e.distribution != "retrograd", e))
        for name in disable:
            kept = [entry for entry in entries if not entry.left_out_by(name)]
            if len(kept) == len(entries):
                known = sorted({e.distribution for e in entries} | {e.label for e in entries})
                raise PluginError(
                    f"[plugins] disable: nothing installed is called {name!r}"
                    f"{_nearest(name, known)}; give a distribution or kind.name"
                )
            entries = kept
        table: dict[tuple[str, str], list[PluginEntry]] = {}
        for entry in entries:
            table.setdefault((entry.kind, entry.name), []).append(entry)
        return cls(table)

    def names(self, kind: str) -> list[str]:
        """Names offered for a kind, sorted."""
        return [name for (entry_kind, name) in self.entries if entry_kind == kind]

    def all(self) -> list[PluginEntry]:
        """Every entry, sorted."""
        return [entry for entries in self.entries.values() for entry in entries]

    def find(self, kind: str, name: str) -> PluginEntry:
        """The one entry that offers `name`.

        Raises `PluginError` if there is none (listing what is installed and the likely `pip install`), or if
        two distributions offer it.
        """
        entries = self.entries.get((kind, name), ())
        if len(entries) == 1:
            return entries[0]
        if not entries:
            raise PluginError(self.unknown(kind, name))
        owners = " and ".join(f"{entry.distribution} {entry.version}" for entry in entries)
        raise PluginError(
            f"the {KINDS[kind].singular} {name!r} is offered by {owners}; name the one not wanted in"
            f' [plugins] disable = ["{entries[-1].distribution}"]'
        )

    def unknown(self, kind: str, name: str) -> str:
        """The message for a name that nothing offers."""
        what = KINDS[kind]
        names = self.names(kind)
        listing = f"installed: {', '.join(names) or 'none'}"
        if name in PLANNED.get(kind, ()):
            return f"the {what.singular} {name!r} is not in this version of retrograd yet; {listing}"
        nearest = _nearest(name, names)
        if nearest:
            return f"no {what.singular} {name!r} is installed{nearest}; {listing}"
        return (
            f"no {what.singular} {name!r} is installed; {listing}; a third party's would likely be"
            f" `pip install retrograd-{what.pip_prefix}-{name.replace('_', '-')}`"
        )


def _normalise(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


def _nearest(name: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
