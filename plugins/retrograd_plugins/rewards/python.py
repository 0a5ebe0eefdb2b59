"""A Python function that scores answers, one at a time::

    [grpo]
    reward = "python:rewards:length"

calls `length(prompt, completion)` of `rewards.py` beside the TOML. `./lib/rewards.py:length` names the file
itself. The directory of the TOML is first on `sys.path` while the module is imported and while the function
runs, at no other time. Parameters called `messages`, `metadata` or `finish`, and `**keywords`, receive those
fields of the answer (`retrograd_hookspecs.Answer`); `metadata` is a copy.

The function returns a finite number (True and False are 1 and 0), None for an answer without a reward, or a
`Score`. Anything else, and an exception, is a score of kind "error" that says what happened and where. An
exception is never a reward.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from retrograd_hookspecs import Answer, BuildContext, Component, PluginError, Reward, Score, hookimpl, key

_FIELDS = ("messages", "metadata", "finish")
_SHOWN_CHARACTERS = 80


@attrs.frozen(kw_only=True)
class PythonConfig:
    """What an algorithm passes on from its own table."""

    function: str = key(doc='Function as "module:function" or "./file.py:function".')


class PythonReward:
    """Calls a function once an answer, with `directory` first on `sys.path`."""

    def __init__(self, function: Callable[..., Any], directory: Path, name: str) -> None:
        self._function = function
        self._directory = directory
        self._fields = _extra_fields(function, name)

    def score(self, answers: Sequence[Answer]) -> Sequence[Score]:
        """One score per answer; what the function raises becomes a score of kind "error"."""
        with _importable(self._directory):
            return [self._one(answer) for answer in answers]

    def close(self) -> None:
        """Nothing is held."""

    def _one(self, answer: Answer) -> Score:
        fields = {name: copy.deepcopy(getattr(answer, name)) for name in self._fields}
        try:
            return _score(self._function(answer.prompt, answer.completion, **fields))
        except (Exception, SystemExit) as error:
            return Score(kind="error", explanation=_raised(error, self._function))


def load_function(name: str, directory: Path) -> Callable[..., Any]:
    """The function that `module:function` or `./file.py:function` names. Raises `PluginError`."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise PluginError(f'reward function {name!r}: write "module:function" or "./file.py:function"')
    with _importable(directory):
        by_path = "/" in source or source.endswith(".py")
        module = _from_file(directory / source, name) if by_path else _from_name(source, directory, name)
    functions = [
        found
        for found, value in vars(module).items()
        if callable(value) and not inspect.isclass(value) and not found.startswith("_")
    ]
    place = getattr(module, "__file__", None) or source
    if not hasattr(module, attribute):
        raise PluginError(
            f"reward function {name!r}: {place} has no {attribute!r}{_near(attribute, functions)}"
        )
    function = getattr(module, attribute)
    if not callable(function):
        kind = type(function).__name__
        raise PluginError(
            f"reward function {name!r}: {attribute!r} in {place} is not a function but of type {kind}"
        )
    if inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "a class" if inspect.isclass(function) else "asynchronous"
        raise PluginError(
            f"reward function {name!r}: {attribute!r} in {place} is {kind}: it must be a plain function"
        )
    return function  # type: ignore[no-any-return]


def _from_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        near = _near(path.name, [found.name for found in path.parent.glob("*.py")])
        raise PluginError(f"reward function {name!r}: there is no file {path}{near}")
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    unique = f"retrograd_reward_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"reward function {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        raise PluginError(
            f"reward function {name!r}: importing {path} failed: {_import_error(error)}"
        ) from error
    return module


def _from_name(source: str, directory: Path, name: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(source)
    except (Exception, SystemExit) as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{source}.".startswith(f"{error.name}.")
        ):
            near = _near(source, [path.stem for path in directory.glob("*.py")])
            where = f"neither in {directory} nor installed"
            raise PluginError(f"reward function {name!r}: no module {error.name!r}, {where}{near}") from error
        raise PluginError(
            f"reward function {name!r}: importing {source!r} failed: {_import_error(error)}"
        ) from error
    own = directory.joinpath(*source.split("."))
    candidates = [path for path in (own.with_suffix(".py"), own / "__init__.py") if path.is_file()]
    found = getattr(module, "__file__", None)
    if candidates and not any(found and path.samefile(found) for path in candidates):
        raise PluginError(
            f"reward function {name!r}: {candidates[0]} is hidden by the module {source!r} of"
            f' {found or "Python itself"}: rename the file, or write "./{candidates[0].name}:…"'
        )
    return module


def _extra_fields(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Fields beyond prompt and completion that the function takes. Raises `PluginError`."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some functions written in C
        return ()
    positional = [
        p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if positional[:2] == ["completion", "prompt"]:
        raise PluginError(
            f"reward function {name!r} takes (completion, prompt): the prompt is the first argument"
        )
    by_keyword = [
        p.name
        for p in parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in positional[:2]
    ]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    fields = tuple(field for field in _FIELDS if takes_all or field in by_keyword)
    try:
        inspect.signature(function).bind("", "", **dict.fromkeys(fields))
    except TypeError as error:
        raise PluginError(
            f"reward function {name!r} cannot be called as function(prompt, completion): {error}"
            f" (it may also take {', '.join(_FIELDS)})"
        ) from error
    return fields


def _score(result: Any) -> Score:
    """What a function returned, as a score."""
    if result is None:
        return Score(kind="missing", explanation="the reward function returned None")
    if isinstance(result, Score):
        return _checked(result)
    if not hasattr(type(result), "__float__") and not hasattr(type(result), "__index__"):
        hint = (
            ": it is called once an answer and returns one number" if isinstance(result, list | tuple) else ""
        )
        return _error(f"returned {_shown(result)}, not a number{hint}")
    # NumPy turns texts into numbers, and drops the imaginary part of complex ones.
    if getattr(getattr(result, "dtype", None), "kind", "f") not in "biuf":
        return _error(f"returned {_shown(result)}, not a number")
    try:
        value = float(result)
    except (TypeError, ValueError, OverflowError) as error:
        return _error(f"returned {_shown(result)}, not a finite number ({error})")
    if not math.isfinite(value):
        return _error(f"returned {value}, not a finite number")
    return Score(kind="value", value=value)


def _checked(score: Score) -> Score:
    if score.kind not in ("value", "missing", "error"):
        return _error(f"returned a Score of the unknown kind {score.kind!r}")
    if score.kind == "value" and not _finite(score.value):
        return _error(f"returned a Score with the value {score.value!r}, not a finite number")
    weight = score.judge_weight
    if weight is not None and not (_finite(weight) and weight >= 0):
        return _error(f"returned a Score with the judge_weight {weight!r}, not a number of at least 0")
    return score


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _error(what: str) -> Score:
    return Score(kind="error", explanation=f"the reward function {what}")


def _shown(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return f"{text} (of type {type(value).__name__})"


def _raised(error: BaseException, function: Callable[..., Any]) -> str:
    """`ValueError: message (rewards.py:12)`, the line being the last one in the function's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    place = (own or frames)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def _import_error(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    return f"{type(error).__name__}: {error} ({frames[-1].filename}:{frames[-1].lineno})"


def _near(name: str, known: Sequence[str]) -> str:
    from retrograd.config.messages import did_you_mean, listing

    text = did_you_mean(name, known) or listing(known, what="there are")
    return f" ({text})" if text else ""


@contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """The directory is first on `sys.path` while the block runs, and what is printed goes to standard error:
    standard output is the command's own, JSON for `--json`."""
    entry = str(directory)
    sys.path.insert(0, entry)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        with suppress(ValueError):  # the module may have changed the path itself
            sys.path.remove(entry)


def _build(config: PythonConfig, context: BuildContext) -> Reward:
    function = load_function(config.function, context.base_dir)
    return PythonReward(function, context.base_dir, config.function)


@hookimpl
def retrograd_rewards() -> list[Component[PythonConfig, Reward]]:
    """`python`."""
    return [
        Component(
            name="python",
            config=PythonConfig,
            build=_build,
            summary="A Python function called once an answer.",
        )
    ]
