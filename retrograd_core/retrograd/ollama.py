"""An Ollama Modelfile beside a merged GGUF.

Ollama writes prompts with a Go template of its own, not with the GGUF's Jinja template. For the common
families the equivalent Go template is given; where the model's own template is at hand, its output is
compared with what the Go template writes, and a default system prompt that it adds becomes `SYSTEM`. For any
other template `TEMPLATE` is left out: Ollama then recognises known Jinja templates itself.

Source: https://docs.ollama.com/modelfile
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from retrograd_hookspecs import ChatTemplate, Message, ModelFile, TokenizerError

DEFAULT_NUM_CTX = 8192
"""Context in tokens where the caller names none and the model allows that many."""

Turns = Sequence[Message]


@attrs.frozen(kw_only=True)
class Family:
    """How a family of models writes a conversation, in Go's template language and in Python.

    The two say the same; neither writes BOS, which Ollama adds as the GGUF asks for it.
    """

    name: str
    markers: tuple[str, ...]
    """Texts that all occur in the Jinja templates of the family."""
    go: str
    write: Callable[[Turns], str]
    stop: str


def _chatml(turns: Turns) -> str:
    body = "".join(f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in turns)
    return body + "<|im_start|>assistant\n"


def _llama3(turns: Turns) -> str:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    body = "".join(head.format(turn.role) + f"{turn.content}<|eot_id|>" for turn in turns)
    return body + head.format("assistant")


def _gemma(turns: Turns) -> str:
    out, lead = "", ""
    for turn in turns:
        if turn.role == "system":
            lead = f"{turn.content}\n\n"
        elif turn.role == "assistant":
            out += f"<start_of_turn>model\n{turn.content}<end_of_turn>\n"
        else:
            out += f"<start_of_turn>user\n{lead}{turn.content}<end_of_turn>\n"
            lead = ""
    return out + "<start_of_turn>model\n"


def _mistral(turns: Turns) -> str:
    out, lead = "", ""
    for turn in turns:
        if turn.role == "system":
            lead = f"{turn.content}\n\n"
        elif turn.role == "assistant":
            out += f" {turn.content}</s>"
        else:
            out += f"[INST] {lead}{turn.content} [/INST]"
            lead = ""
    return out


def _phi(turns: Turns) -> str:
    body = "".join(f"<|{turn.role}|>\n{turn.content}<|end|>\n" for turn in turns)
    return body + "<|assistant|>\n"


# `-}}` and `{{-` take away all white space beside them, so line breaks that are wanted stand inside the text.
FAMILIES: tuple[Family, ...] = (
    Family(
        name="ChatML",
        markers=("<|im_start|>", "<|im_end|>"),
        go="""\
{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
""",
        write=_chatml,
        stop="<|im_end|>",
    ),
    Family(
        name="Llama 3",
        markers=("<|start_header_id|>", "<|eot_id|>"),
        go="""\
{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>

""",
        write=_llama3,
        stop="<|eot_id|>",
    ),
    Family(
        name="Gemma",
        markers=("<start_of_turn>",),
        go="""\
{{- $lead := "" }}
{{- range .Messages }}
{{- if eq .Role "system" }}{{ $lead = printf "%s\\n\\n" .Content }}
{{- else if eq .Role "assistant" }}<start_of_turn>model
{{ .Content }}<end_of_turn>
{{ else }}<start_of_turn>user
{{ $lead }}{{ .Content }}<end_of_turn>
{{ $lead = "" }}
{{- end }}
{{- end }}<start_of_turn>model
""",
        write=_gemma,
        stop="<end_of_turn>",
    ),
    Family(
        name="Mistral",
        markers=("[INST]", "[/INST]"),
        go="""\
{{- $lead := "" }}
{{- range .Messages }}
{{- if eq .Role "system" }}{{ $lead = printf "%s\\n\\n" .Content }}
{{- else if eq .Role "assistant" }} {{ .Content }}</s>
{{- else }}[INST] {{ $lead }}{{ .Content }} [/INST]{{ $lead = "" }}
{{- end }}
{{- end }}""",
        write=_mistral,
        stop="</s>",
    ),
    Family(
        name="Phi",
        markers=("<|assistant|>", "<|end|>"),
        go="""\
{{- range .Messages }}<|{{ .Role }}|>
{{ .Content }}<|end|>
{{ end }}<|assistant|>
""",
        write=_phi,
        stop="<|end|>",
    ),
)


def modelfile(
    file: ModelFile,
    gguf_name: str,
    *,
    num_ctx: int | None = None,
    stops: Sequence[str] = (),
    template: ChatTemplate | None = None,
) -> str:
    """Text of a Modelfile for the model `file`, stored as `gguf_name` in the Modelfile's directory.

    `num_ctx` is the context in tokens (default: the model's, at most 8192), `stops` the texts of the stop
    tokens (default: those that the metadata names). With `template`, the model's own, `TEMPLATE` is given
    only if it writes the same.
    """
    jinja = str(file.metadata.get("tokenizer.chat_template", ""))
    family = detect_family(jinja)
    system = ""
    if family is None:
        found = "the chat template is of no family known here" if jinja else "the GGUF has no chat template"
    elif template is not None:
        # Ollama writes BOS itself where the GGUF asks for it, so it is not part of the turns then.
        adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token", True)
        found, system = _compare(family, template, _token(file, "bos") if adds_bos else "")
    else:
        found = ""
    limit = int(file.get("context_length", DEFAULT_NUM_CTX))
    source = f"./{gguf_name}"
    lines = [f"FROM {_quoted(source) if ' ' in source else source}", ""]
    if family is None or found:
        lines += [
            f"# No TEMPLATE: {found}. Ollama recognises common chat",
            "# templates of a GGUF by itself; see what it took with `ollama show --template NAME`.",
        ]
    else:
        checked = "checked against" if template is not None else "by the look of"
        lines += [
            f"# {family.name} turns, {checked} the GGUF's own template. Tool calls are not covered.",
            f'TEMPLATE """{family.go}"""',
        ]
    if system:
        lines += [
            "# The model's own template adds this to a conversation without a system message.",
            f"SYSTEM {_quoted(system)}",
        ]
    lines += ["", *(f"PARAMETER stop {_quoted(stop)}" for stop in stops or _stops(file, family))]
    lines += [
        f"# The model allows up to {limit} tokens; a longer context takes more memory.",
        f"PARAMETER num_ctx {num_ctx or min(limit, DEFAULT_NUM_CTX)}",
    ]
    return "\n".join(lines) + "\n"


def detect_family(jinja: str) -> Family | None:
    """The family whose markers all occur in a Jinja chat template, or None."""
    if "<|im_sep|>" in jinja:  # Phi-4: ChatML's tokens in another order
        return None
    return next((family for family in FAMILIES if all(marker in jinja for marker in family.markers)), None)


def _compare(family: Family, template: ChatTemplate, bos: str) -> tuple[str, str]:
    """What differs between the family's prompts and the template's ("" if nothing), and a default system
    prompt that the template adds."""
    user, system, answer = (
        Message(role="user", content="A question?"),
        Message(role="system", content="Some advice."),
        Message(role="assistant", content="An answer."),
    )
    try:
        bare, *rest = (
            template.render(turns, add_generation_prompt=True).removeprefix(bos)
            for turns in ((user,), (system, user), (system, user, answer, user), (user, answer, user))
        )
    except TokenizerError as error:
        return f"the GGUF's own template refuses an ordinary conversation ({error})", ""
    default = _default_system(family, bare, user)
    lead = (Message(role="system", content=default),) if default else ()
    expected = [
        family.write(turns)
        for turns in (
            (*lead, user),
            (system, user),
            (system, user, answer, user),
            (*lead, user, answer, user),
        )
    ]
    for ours, theirs in zip(expected, (bare, *rest), strict=True):
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            excerpt = theirs[max(0, at - 20) : at + 20]
            return f"the GGUF's own template does not write plain {family.name} turns ({excerpt!r})", ""
    return "", default


def _default_system(family: Family, bare: str, user: Message) -> str:
    """The system prompt in `bare`, what the template writes for `user` alone."""
    if bare == family.write((user,)):
        return ""
    mark = "\0"
    before, after = family.write((Message(role="system", content=mark), user)).split(mark)
    if bare.startswith(before) and bare.endswith(after):
        return bare[len(before) : len(bare) - len(after)]
    return ""


def _stops(file: ModelFile, family: Family | None) -> list[str]:
    stops = [_token(file, kind) for kind in ("eot", "eom", "eos")]
    if family is not None and family.stop in file.metadata.get("tokenizer.ggml.tokens", ()):
        stops.insert(0, family.stop)
    return list(dict.fromkeys(stop for stop in stops if stop))


def _token(file: ModelFile, kind: str) -> str:
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    index = file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return str(tokens[index]) if index is not None and index < len(tokens) else ""


def _quoted(text: str) -> str:
    # A Modelfile has no escapes: text with quotes or line breaks stands in triple quotes.
    return f'"""{text}"""' if '"' in text or "\n" in text else f'"{text}"'
