"""What all chat formats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from retrograd_hookspecs import (
    BuildContext,
    Component,
    DataError,
    NoConfig,
    ParsedTurn,
    Problem,
    ToolCall,
)

from ._reading import json_text


class FormatBase(ABC):
    """Implements `retrograd_hookspecs.ChatFormat`. `template` decides between variants of a family; any
    variant is read."""

    name: ClassVar[str]

    def __init__(self, template: str = "") -> None:
        self._template = template

    @abstractmethod
    def matches(self, template: str, vocabulary: Mapping[str, int]) -> bool:
        """True if a model with this chat template and vocabulary speaks the format."""

    @abstractmethod
    def parse(self, text: str) -> ParsedTurn:
        """Read a sampled assistant turn (without its stop token); never raises."""

    @abstractmethod
    def _write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as text; need not care about calls that the format cannot express."""

    def format_calls(self, calls: Sequence[ToolCall]) -> str:
        """The text that a model of this family writes for `calls`.

        Raises `DataError` for calls that the format cannot express, such as a text that contains its own
        closing tag: what would be read back is something else.
        """
        if not calls:
            return ""
        try:
            text = self._write(calls)
            parsed = self.parse(text)
            same = not parsed.error and _contents(parsed.tool_calls) == _contents(calls)
        except (ValueError, TypeError) as error:
            raise self._inexpressible(calls, str(error)) from error
        if not same:
            raise self._inexpressible(calls, parsed.error or "it would be read back as something else")
        return text

    def _inexpressible(self, calls: Sequence[ToolCall], reason: str) -> DataError:
        names = ", ".join(repr(call.name) for call in calls)
        return DataError(
            [
                Problem(
                    where="tool call",
                    message=f"the format {self.name!r} cannot write the call of {names}: {reason}",
                    hint="change the arguments, or give the turn as raw text",
                )
            ]
        )


def _contents(calls: Sequence[ToolCall]) -> list[tuple[str, str]]:
    # JSON text tells 1 from 1.0 and True, which are equal in Python.
    return [(call.name, json_text(call.arguments)) for call in calls]


def component(
    format_class: Callable[[str], FormatBase], name: str, summary: str, source: str
) -> Component[Any, Any]:
    """The component of a chat format, built with the model's chat template."""

    def build(config: NoConfig, context: BuildContext) -> FormatBase:
        return format_class(context.service("template").source)

    return Component(
        name=name, config=NoConfig, build=build, summary=summary, source=source, needs=("template",)
    )
