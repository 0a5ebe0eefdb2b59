"""Contract of a model source: `check_model_source` raises `AssertionError` where it is broken."""

from __future__ import annotations

from collections.abc import Iterable

from retrograd_hookspecs import ModelError, ModelSource


def check_model_source(source: ModelSource, locator: str, *, absent: Iterable[str], scheme: str) -> None:
    """Check what every model source promises.

    Args:
        locator: of a GGUF that is there.
        absent: locators of the scheme that name nothing, or are malformed.
        scheme: the component's name.

    A locator gives the path of an existing GGUF, the same each time; one that names nothing is refused with a
    `ModelError` that shows it.
    """
    assert locator.startswith(f"{scheme}:"), f"{locator} is no locator of the scheme {scheme!r}"
    path = source.resolve(locator)
    assert path.is_file(), f"{locator}: there is no file {path}"
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF", f"{locator}: {path} is no GGUF"
    assert source.resolve(locator) == path, f"{locator} gives another path the second time"
    for wrong in absent:
        said = _refusal(source, wrong)
        assert wrong in said, f"the message does not show the locator {wrong}: {said}"


def _refusal(source: ModelSource, locator: str) -> str:
    try:
        found = source.resolve(locator)
    except ModelError as error:
        return str(error)
    raise AssertionError(f"{locator} names nothing and gave {found}")
