"""Rules about whole sections: which of them a run reads, and what a stray one was meant to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from retrograd_hookspecs import Problem

from .document import join_key
from .keys import keys_of
from .messages import did_you_mean, listing, nearest, quote
from .run_config import SharedSections, component_paths
from .scanner import KeyPath
from .sections import NAMED_TABLES, PLANNED_SECTIONS, SHARED_SECTIONS
from .shape import RunShape, table_name


def shared_sections_apply(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """`[evaluation]`, `[observe]` and `[reference]` only with an algorithm that reads them."""
    for section in ("evaluation", "observe", "reference"):
        if shared.given(section) and shape.algorithm and section not in shape.applies:
            yield _section_problem(
                shared,
                (section,),
                f"this section does not apply: the algorithm {quote(shape.algorithm)}"
                f"{shared.places('run.algorithm')} does not read it",
                "remove it",
            )


def component_sections_apply(shared: SharedSections, shape: RunShape) -> Iterator[Problem]:
    """Every section of a component is one that this run reads; what it requires is there."""
    for path in component_paths(shared.document):
        if join_key(path) not in shape.sections:
            yield from _stray(shared, shape, path)
    for name in sorted(shape.required):
        if shape.algorithm and not shared.given(name):
            yield _section_problem(
                shared,
                (name,),
                f"this section is missing: {shape.sections[name]}",
                f"an empty [{name}] takes the defaults",
            )


def _stray(shared: SharedSections, shape: RunShape, path: KeyPath) -> Iterator[Problem]:
    name = str(path[0])
    if name in NAMED_TABLES:
        yield from _stray_named_table(shared, shape, path)
    elif isinstance(shared.document.value(path), Mapping | list):
        yield from _stray_section(shared, shape, path)
    else:
        owners = [s for s, cls in SHARED_SECTIONS.items() if name in {key.name for key in keys_of(cls)}]
        hint = f"did you mean {owners[0]}.{name}?" if owners else "keys belong below a [section]"
        yield _problem(shared, path, join_key(path), "unknown key outside any section", hint)


def _stray_section(shared: SharedSections, shape: RunShape, path: KeyPath) -> Iterator[Problem]:
    name = str(path[0])
    known = [*SHARED_SECTIONS, *sorted(shape.sections), *NAMED_TABLES]
    if shape.trainable and _owners(shape, "trainables", name):
        yield _section_problem(
            shared,
            path,
            "this section does not apply with training.trainable ="
            f" {quote(shape.trainable)}{shared.places('training.trainable')}",
            "remove it",
        )
    # Without its algorithm a run's sections are not known: then only a misspelt name is one.
    elif not shape.algorithm and not nearest(name, known):
        return
    elif owners := _owners(shape, "algorithms", name):
        if shape.algorithm:
            yield _section_problem(
                shared,
                path,
                f"this section does not apply: it is read if run.algorithm is {' or '.join(owners)}, not"
                f" {quote(shape.algorithm)}{shared.places('run.algorithm')}",
                "a run has exactly one algorithm section",
            )
    else:
        hint = did_you_mean(name, known) or listing(known, what="sections of this run")
        yield _section_problem(shared, path, "unknown section: nothing in this run reads it", hint)


def _owners(shape: RunShape, kind: str, section: str) -> list[str]:
    """Names in quotes of what reads a section, installed or still to come."""
    installed = [quote(c.name) for c in shape.installed(kind) if table_name(kind, c) == section]
    return installed or [quote(name) for name in PLANNED_SECTIONS[kind].get(section, ())]


def _stray_named_table(shared: SharedSections, shape: RunShape, path: KeyPath) -> Iterator[Problem]:
    table = str(path[0])
    named = NAMED_TABLES[table]
    chosen = [name.partition(".")[2] for name in shape.sections if name.startswith(f"{table}.")]
    if len(path) < 2 or not isinstance(shared.document.value(path), Mapping):
        yield _problem(
            shared,
            path,
            join_key(path),
            f"expected a table [{table}.NAME] with the options of one {named.singular}",
            f"did you mean [{table}.{chosen[0] if chosen else 'NAME'}]?",
        )
        return
    if table == "plugin":
        return  # such a table selects its plugin; that it is not installed is said where plugins are found
    if not chosen and not shape.algorithm:
        return  # a command that trains nothing selects no component of this kind
    used = " and ".join(quote(name) for name in chosen) or f"no {named.singular} with options"
    yield _section_problem(
        shared,
        path,
        f"this section does not apply: {named.selector} selects {used}",
        did_you_mean(str(path[1]), chosen) or "remove it",
    )


def _section_problem(shared: SharedSections, path: KeyPath, message: str, hint: str) -> Problem:
    return _problem(shared, path, f"[{join_key(path)}]", message, hint)


def _problem(shared: SharedSections, path: KeyPath, key: str, message: str, hint: str) -> Problem:
    return Problem(where=shared.document.origin(path).where, key=key, message=message, hint=hint)
