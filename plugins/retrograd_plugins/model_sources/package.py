"""`package:NAME/path/file.gguf`: a model inside an installed package, found without importing it.

NAME is a distribution (as `pip list` shows it) or an import package. The path is relative to site-packages
or to the package; of a distribution the last parts of it are enough where they are unambiguous.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path, PurePosixPath

from retrograd_hookspecs import Component, ModelError, ModelSource, NoConfig, hookimpl

_LOCATOR = re.compile(r"package:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)/(?P<path>.+)")


class PackageSource:
    """Finds files of installed distributions and packages. Implements `ModelSource`."""

    def resolve(self, locator: str) -> Path:
        """Path of the file; `ModelError` says where it was looked for and what is there."""
        match = _LOCATOR.fullmatch(locator)
        if match is None:
            raise ModelError(f"{locator}: a package locator is package:NAME/path/file.gguf")
        name, path = match["name"], PurePosixPath(match["path"])
        if path.is_absolute() or ".." in path.parts:
            raise ModelError(f"{locator}: the path must stay inside the package")
        distribution = _distribution(name)
        directories = _package_directories(name)
        if distribution is None and not directories:
            raise ModelError(
                f"{locator}: neither a distribution nor a package {name!r} is installed in this environment;"
                f" `pip install {name}`, or use pypi:{name}==VERSION/{path} to fetch only the file"
            )
        found = [directory / path for directory in directories if (directory / path).is_file()]
        listed = _listed(distribution)
        if not found:
            wanted = path.parts
            found = [file for entry, file in listed.items() if entry.parts[-len(wanted) :] == wanted]
        if len(found) == 1:
            return found[0]
        if found:
            raise ModelError(
                f"{locator}: several files match: {', '.join(map(str, found))}; give more of the path"
            )
        models = [str(entry) for entry in listed if entry.suffix == ".gguf"]
        models += [
            str(file.relative_to(directory))
            for directory in directories
            for file in sorted(directory.rglob("*.gguf"))
        ]
        raise ModelError(
            f"{locator}: {name} is installed but has no file {path};"
            f" its models: {', '.join(sorted(set(models))) or 'none'}"
        )


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _listed(distribution: metadata.Distribution | None) -> dict[PurePosixPath, Path]:
    """Files that the distribution's RECORD lists and that exist, by their path below site-packages."""
    if distribution is None:
        return {}
    located = {PurePosixPath(entry): Path(str(entry.locate())) for entry in distribution.files or ()}
    return {entry: file for entry, file in located.items() if file.is_file()}


def _package_directories(name: str) -> list[Path]:
    """Directories of the import package `name`. Finding the spec of a top-level name imports nothing."""
    top, *rest = name.replace("-", "_").split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    candidates = [Path(location).joinpath(*rest) for location in spec.submodule_search_locations]
    return [directory for directory in candidates if directory.is_dir()]


@hookimpl
def retrograd_model_sources() -> list[Component[NoConfig, ModelSource]]:
    return [
        Component(
            name="package",
            config=NoConfig,
            build=lambda _config, _context: PackageSource(),
            summary="A model file inside an installed package: package:NAME/path/file.gguf.",
        )
    ]
