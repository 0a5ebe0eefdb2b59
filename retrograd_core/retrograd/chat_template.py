"""A model's chat template: Jinja in a sandbox, with what Hugging Face gives templates.

Templates are written for `transformers.apply_chat_template`: an immutable sandbox, `trim_blocks` and
`lstrip_blocks`, loop controls, `tojson` with `json.dumps`'s options, `raise_exception`, `strftime_now`,
`{% generation %}`. Differences, all on purpose:

- `strftime_now` tells a fixed day unless a clock is given: a resumed run must render the same bytes.
- Output, repetition, texts and numbers that grow in a loop, and counted loops are bounded, each with an error
  that says so. That stops accidents; time and memory of a hostile template are not bounded otherwise.
- Templates disagree on whether a call's arguments are an object or its JSON text, and whether a turn of
  calls alone has content `none` or `""`; each template is tried once and gets what it can write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor

from retrograd_hookspecs import Message, Tokenizer, TokenizerError, ToolCall

from .tool_prompt import observed

Clock = Callable[[], datetime]
MAX_CHARACTERS = 32 * 2**20
"""A rendered conversation may not be longer; no context holds a hundredth of it."""
MAX_COUNTED = 1_000_000
"""Numbers that all `range(…)` of one rendering may give together."""
MAX_BITS = 4096
"""Bits of a product of whole numbers."""

CHATML = """\
{#- ChatML, because the model has no chat template of its own -#}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + TURN_END + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Used for a model without a template. TURN_END is `<|im_end|>` if the vocabulary has it, else the model's
EOS text: a turn must end with a token that the model can stop on."""

_PROBE_KEY, _PROBE_VALUE, _PROBE_NAME = "zq_key", "zq_value", "zq_name"


def fixed_clock() -> datetime:
    """26 July 2024, the day that Llama 3.1's template names where it knows no date."""
    return datetime(2024, 7, 26)


@attrs.frozen
class _CallStyle:
    """What a template expects of an assistant message with calls."""

    arguments_as_text: bool
    empty_content: str | None


class JinjaChatTemplate:
    """A chat template with the model's special tokens. Implements `retrograd_hookspecs.ChatTemplate`.

    `source` is the default template; where the model has a separate one for tools, that follows it, so
    that a `ChatFormat` sees both. `own` is False for the built-in ChatML.

    Raises `TokenizerError` for a template that is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str = "",
        own: bool = True,
        clock: Clock = fixed_clock,
    ) -> None:
        self.source = f"{source}\n{tool_source}" if tool_source else source
        self.own = own
        self._special_tokens = dict(special_tokens or {})
        self._environment = _Environment(clock)
        self._template = self._compiled(source)
        self._tool_template = self._compiled(tool_source) if tool_source else self._template
        self._styles: dict[int, _CallStyle] = {}

    @classmethod
    def from_model(
        cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, *, clock: Clock = fixed_clock
    ) -> JinjaChatTemplate:
        """The template of a GGUF (`tokenizer.chat_template`, and `.tool_use` if there is one), or ChatML."""
        source = metadata.get("tokenizer.chat_template")
        tool_source = str(metadata.get("tokenizer.chat_template.tool_use", ""))
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        special = _special_tokens(metadata, tokenizer)
        own = bool(source or tool_source)
        if not own:
            end = "<|im_end|>" if "<|im_end|>" in tokens else special.get("eos_token", "<|im_end|>")
            source = CHATML.replace("TURN_END", json.dumps(end, ensure_ascii=False))
        return cls(
            str(source or tool_source),
            special_tokens=special,
            tool_source=tool_source if source else "",
            own=own,
            clock=clock,
        )

    def fallback_note(self) -> str:
        """What to tell the user if the model has no template, else ""."""
        if self.own:
            return ""
        return (
            "the model has no chat template (tokenizer.chat_template): conversations are written as ChatML."
            " Whoever runs the tuned model must use the same template"
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of the conversation.

        `tools` are in OpenAI's shape. A failed observation (`is_error`) begins with `ERROR: `. `variables`
        are the template's own (`enable_thinking`, `date_string`).

        Raises `TokenizerError` with what the template raised, and for output beyond `MAX_CHARACTERS`.
        """
        template = self._tool_template if tools else self._template
        style = _CallStyle(False, None)
        if any(message.tool_calls for message in messages):
            style = self._call_style(template, variables)
        return self._run(
            template,
            [_as_dict(message, style) for message in messages],
            [_plain(tool) for tool in tools],
            add_generation_prompt,
            variables,
        )

    def _compiled(self, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the model's chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error

    def _run(
        self,
        template: jinja2.Template,
        messages: list[dict[str, Any]],
        tools: list[Any],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> str:
        budget = _Budget()
        names: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "range": budget.range,
            **(variables or {}),
        }
        parts: list[str] = []
        length = 0
        try:
            for part in template.generate(names):
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise _LimitError(f"it wrote more than {MAX_CHARACTERS} characters")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template refused the conversation: {error}") from error
        except RecursionError as error:
            raise TokenizerError("the chat template calls itself without end") from error
        except Exception as error:
            # Templates run arbitrary expressions, so anything may come out of one.
            line = _template_line(error)
            where = f" (line {line} of the template)" if line else ""
            raise TokenizerError(
                f"the chat template failed on the conversation: {type(error).__name__}: {error}{where}"
            ) from error
        return "".join(parts)

    def _call_style(self, template: jinja2.Template, variables: Mapping[str, Any] | None) -> _CallStyle:
        style = self._styles.get(id(template))
        if style is None:
            style = self._styles[id(template)] = self._probe_calls(template, variables)
        return style

    def _probe_calls(self, template: jinja2.Template, variables: Mapping[str, Any] | None) -> _CallStyle:
        """The first way to hand over a call that the template writes as JSON, without Python's spelling.

        For a template that writes no calls, the first that it does not fail on.
        """
        call = ToolCall(name=_PROBE_NAME, arguments={_PROBE_KEY: _PROBE_VALUE}, id="zqcall000")
        messages = (
            Message(role="user", content="."),
            Message(role="assistant", content="", tool_calls=(call,)),
        )
        styles = [_CallStyle(text, empty) for text in (False, True) for empty in (None, "")]
        accepted: list[_CallStyle] = []
        for style in styles:
            shown = [_as_dict(message, style) for message in messages]
            try:
                text = self._run(template, shown, [], False, variables)
            except TokenizerError:
                continue
            accepted.append(style)
            escaped = f'\\"{_PROBE_KEY}' in text or f"'{_PROBE_KEY}'" in text
            if _PROBE_NAME in text and _PROBE_VALUE in text and not escaped and "None" not in text:
                return style
        return accepted[0] if accepted else styles[0]


class _LimitError(jinja2.TemplateError):
    """A template went beyond what a rendering may cost."""


class _Budget:
    """Bounds the counted loops of one rendering, nested ones included."""

    def __init__(self) -> None:
        self._left = MAX_COUNTED

    def range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._left -= len(numbers)
        if self._left < 0:
            raise _LimitError(f"its loops over range(…) count beyond {MAX_COUNTED}")
        return numbers


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for transformers; here it is text."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration is a mutable set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CheckedConcatenation(jinja2.visitor.NodeTransformer):
    """Turns `a ~ b` into a call of `_Environment.concatenate`: the sandbox has no hook for it."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802  jinja2's name
        self.generic_visit(node)
        function = jinja2.nodes.EnvironmentAttribute("concatenate")
        return jinja2.nodes.Call(function, node.nodes, [], None, None, lineno=node.lineno)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of chat templates."""

    intercepted_binops = frozenset(("*", "**", "+"))

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]  # text without end
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: clock().strftime(format)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse repetition and powers that would fill the memory, and texts that double in a loop."""
        if operator == "*":
            size = max((len(side) for side in (left, right) if hasattr(side, "__len__")), default=0)
            count = next((side for side in (left, right) if isinstance(side, int)), 0)
            if size * count > MAX_CHARACTERS:
                raise _LimitError(f"it repeats {size} elements {count} times")
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() + right.bit_length()
                if bits > MAX_BITS:
                    raise _LimitError(f"it multiplies to a number of {bits} bits")
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise _LimitError(f"it raises a number to the power of {right}")
        result = super().call_binop(context, operator, left, right)
        return _limited(result) if operator == "+" and isinstance(result, str) else result

    def concatenate(self, *parts: Any) -> str:
        """`a ~ b` of the template."""
        return _limited("".join(map(str, parts)))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _CheckedConcatenation().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]


def _limited(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise _LimitError(f"it put together a text of {len(text)} characters")
    return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`json.dumps`, where Jinja's own filter would escape `<` and `'` for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_dict(message: Message, style: _CallStyle) -> dict[str, Any]:
    """The message in OpenAI's shape."""
    message = observed(message)
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        if not message.content:
            shown["content"] = style.empty_content
        shown["tool_calls"] = [_call_as_dict(call, style) for call in message.tool_calls]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.name:
        shown["name"] = message.name
    return shown


def _call_as_dict(call: ToolCall, style: _CallStyle) -> dict[str, Any]:
    arguments = _plain(call.arguments)
    text = json.dumps(arguments, ensure_ascii=False) if style.arguments_as_text else arguments
    shown: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": text}}
    if call.id:
        shown["id"] = call.id
    return shown


def _plain(value: Any) -> Any:
    """The same with dicts and lists, which is all that `json` and templates know."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _special_tokens(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """`bos_token`, `eos_token` and the others that the model names, as texts."""
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    for role, key in {"unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}.items():
        ids[role] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return {
        f"{role}_token": tokenizer.token_text(token_id)
        for role, token_id in ids.items()
        if token_id is not None
    }


def _template_line(error: BaseException) -> int:
    """Line of the template on which the error was raised; 0 if it came from elsewhere."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
