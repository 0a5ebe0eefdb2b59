"""What a plugin hands to the core: a `Component`, built once a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs

from .config import ConfigTable
from .errors import Problem

C = TypeVar("C")
P = TypeVar("P")


@attrs.frozen(kw_only=True)
class NoConfig:
    """Configuration of a component that reads no keys."""


def _no_build(kind: str, name: str, **keys: Any) -> Any:
    raise LookupError(f"{kind}.{name}: this context builds no further components")


@attrs.frozen(kw_only=True)
class BuildContext:
    """What `Component.build` may use.

    `services` holds exactly the services that the component named in `needs` (for instance
    "model", "tokenizer", "kernels"): the run builds components in the order of these needs.
    """

    config: Any
    """The whole structured run configuration (`retrograd.config.RunConfig`)."""
    base_dir: Path
    """Directory of the TOML file; relative paths resolve against it."""
    services: Mapping[str, Any] = attrs.field(factory=dict)
    build: Callable[..., Any] = _no_build
    """`build(kind, name, **keys)`: build another component of this run, for components made of
    components. `keys` are configuration values instead of the component's own table."""

    def service(self, name: str) -> Any:
        """The service `name`; KeyError with the mend if the component did not declare it."""
        try:
            return self.services[name]
        except KeyError:
            raise KeyError(
                f"service {name!r} was not declared: add it to the component's `needs`"
                f" (declared: {', '.join(sorted(self.services)) or 'none'})"
            ) from None


@attrs.frozen(kw_only=True)
class Component(Generic[C, P]):
    """A named, configurable part. `config` is the attrs class of its TOML table.

    `build` is called at most once a run, after all configuration is known to be valid, and is the
    first place where heavy libraries may be imported.
    """

    name: str
    config: type[C]
    build: Callable[[C, BuildContext], P]
    summary: str
    source: str = ""
    """Paper and equation, or specification, that the component implements."""
    needs: tuple[str, ...] = ()
    """Services that `build` uses; see `BuildContext.services`."""
    extra: str = ""
    """Optional extra that `build` imports from, as `NAME` of `pip install 'retrograd[NAME]'`."""
    section: str = ""
    """Top-level TOML table with the keys of an algorithm or trainable, where it is not `name`."""
    selects: Mapping[str, str] = attrs.field(factory=dict)
    """Keys of this component's table that name another component: key -> kind, `{"loss": "losses"}`. The
    value
    is the name itself, `name:rest` (the component decides what the rest means), or a `ComponentTable`."""
    selected_by: str = ""
    """Dotted key of a shared section that selects this component by being given, besides its kind's own
    key: "metrics.tensorboard_dir" of a sink."""
    fallback: bool = False
    """Serves where the run names no other of its kind: the backend of `model.device = "auto"` on a machine
    without a GPU, the sampler, the chat format that is tried last. One of a kind."""
    gpu: bool = False
    """Of a backend: it is a GPU's, which `model.device` = "gpu" or "auto" take."""
    present: Callable[[], bool] | None = None
    """Of a GPU's backend: is there such a GPU? Asked before anything is built; without it there always is."""
    starts_from: str = ""
    """Of a trainable: the key of its table that names a file which an earlier run saved, to start from:
    "init_adapter"."""
    output_kinds: tuple[str, ...] = ()
    """Of a trainable: the values of `output.kind` that it can write; empty if its `check` looks at them."""
    frozen_base: bool = False
    """Of a trainable: the base weights stay as they are, so that the model without what is trained can be the
    reference of a KL penalty."""
    applies: tuple[str, ...] = ()
    """Optional shared sections that apply to an algorithm: "evaluation", "observe", "reference"."""
    reads: tuple[str, ...] = ()
    """Dotted keys of shared sections that only some components read and this one does
    (`retrograd.config.CONDITIONAL_KEYS`): "training.epochs". Such a key is refused, where it differs
    from its default, in a run none of whose components reads it."""
    fixed_accumulation: bool = False
    """The algorithm fixes `training.gradient_accumulation` to ctx / micro_batch."""
    check: Callable[[C, ConfigTable, Any], Iterable[Problem]] | None = None
    """`check(config, table, run)`: what is wrong across keys, beyond what types, bounds and validators
    of the class tell. `table` knows which keys were given and where; `run` is the RunConfig."""
    requires: tuple[str, ...] = ()
    """Import names that must be importable; checked at load, refused with the pip line of `extra`."""
