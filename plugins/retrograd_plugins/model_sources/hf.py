"""`hf:OWNER/REPO/path/file.gguf`: a model in a repository of the Hugging Face Hub.

`hf:OWNER/REPO@REVISION/file.gguf` takes a branch, tag or commit. Files are kept in huggingface_hub's own
cache; its settings apply (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT). Of a split model
(`-00001-of-00003.gguf`) all parts are fetched.
"""

from __future__ import annotations

import re
from pathlib import Path

from retrograd_hookspecs import Component, ModelError, ModelSource, NoConfig, hookimpl

_LOCATOR = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?/(?P<path>.+\.gguf)", re.IGNORECASE
)
_SPLIT = re.compile(r"(?P<prefix>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")


class HuggingFaceSource:
    """Fetches files from the Hub. Implements `ModelSource`."""

    def resolve(self, locator: str) -> Path:
        """Path of the file in the Hub's cache; `ModelError` says what was looked up and how to mend it."""
        match = _LOCATOR.fullmatch(locator)
        if match is None:
            raise ModelError(f"{locator}: a Hub locator is hf:OWNER/REPO/path/file.gguf")
        names = _parts(match["path"])
        paths = [_fetch(locator, match["repo"], name, match["revision"]) for name in names]
        return paths[names.index(match["path"])]


def _parts(path: str) -> list[str]:
    split = _SPLIT.fullmatch(path)
    if split is None:
        return [path]
    count = int(split["count"])
    return [f"{split['prefix']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _fetch(locator: str, repo: str, name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise ModelError(
            f"{locator}: the Hub needs the package huggingface_hub: `pip install 'retrograd[hf]'`"
        ) from None
    where = f"{repo} at {revision}" if revision else repo
    try:
        return Path(hf_hub_download(repo_id=repo, filename=name, revision=revision))
    except GatedRepoError:
        raise ModelError(
            f"{locator}: {repo} is gated: accept its terms on https://huggingface.co/{repo} and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{locator}: there is no repository {repo} (or it is private and HF_TOKEN does not open it)"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{locator}: {repo} has no revision {revision!r}") from None
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{locator}: {name} is not in the local cache and the Hub cannot be reached; check the network,"
            f" or give the path of a file with --model ({error})"
        ) from error
    except EntryNotFoundError:
        raise ModelError(f"{locator}: {where} has no file {name}; see its files on the Hub") from None
    except Exception as error:
        # Network libraries raise what they like; whatever it is, the user asked for this one file.
        raise ModelError(
            f"{locator}: {name} could not be fetched from {where}: {type(error).__name__}: {error}"
        ) from error


@hookimpl
def retrograd_model_sources() -> list[Component[NoConfig, ModelSource]]:
    return [
        Component(
            name="hf",
            config=NoConfig,
            build=lambda _config, _context: HuggingFaceSource(),
            summary="A model file on the Hugging Face Hub: hf:OWNER/REPO/file.gguf.",
            extra="hf",
            requires=("huggingface_hub",),
        )
    ]
