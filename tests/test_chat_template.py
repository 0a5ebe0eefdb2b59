"""Chat templates: Hugging Face's environment, limits, errors, and how calls are handed over."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from retrograd.chat_template import CHATML, JinjaChatTemplate
from retrograd.tool_prompt import probe_template
from retrograd_hookspecs import Message, TokenizerError, ToolCall
from retrograd_plugins.tokenizers.gpt2 import Gpt2Tokenizer
from tests.tokenizers.vocabularies import pairs_vocabulary

USER = Message(role="user", content="Hi")
CALL = ToolCall(name="add", arguments={"a": 1, "b": ["x", {"c": "é\"'<"}]}, id="call00000")
CALLING = Message(role="assistant", content="", tool_calls=(CALL,))
OBSERVED = Message(role="tool", content="2", tool_call_id="call00000", name="add")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def render(source: str, *messages: Message, **options: Any) -> str:
    return JinjaChatTemplate(source).render(messages or (USER,), **options)


def test_blocks_are_trimmed_as_in_transformers() -> None:
    loop = "{% for m in messages %}\n"
    source = loop + "    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "Hi\n"


def test_loop_controls_and_namespace() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
        "{% if i == 5 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}{{ i }}{% endfor %}={{ ns.n }}"
    )
    assert render(source) == "0134=8"


def test_tojson_is_json_dumps() -> None:
    value = {"b": "é<>&'", "a": [1, 2.5, None, True]}
    assert render("{{ v | tojson }}", variables={"v": value}) == '{"b": "é<>&\'", "a": [1, 2.5, null, true]}'
    assert render("{{ v | tojson(indent=2) }}", variables={"v": {"a": 1}}) == '{\n  "a": 1\n}'
    source = "{{ v | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
    assert render(source, variables={"v": value}) == '{"a":[1,2.5,null,true],"b":"\\u00e9<>&\'"}'


def test_macros_and_generation_tags() -> None:
    source = (
        "{% macro turn(m) %}[{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}]{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    )
    assert render(source, USER, Message(role="assistant", content="Yo")) == "[user:Hi][assistant:Yo]"


def test_concatenation_is_of_texts() -> None:
    assert render("{{ 1 ~ 'a' ~ none ~ nothing ~ 2.5 }}") == "1aNone2.5"


def test_clock_is_fixed_unless_given() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert render(source) == "26 Jul 2024"
    given = JinjaChatTemplate(source, clock=lambda: datetime(2031, 2, 3))
    assert given.render((USER,)) == "03 Feb 2031"


def test_names_given_to_templates() -> None:
    source = (
        "{{ bos_token }}{{ tools is none }}{{ add_generation_prompt }}{{ nothing is defined }}{{ extra }}"
    )
    template = JinjaChatTemplate(source, special_tokens={"bos_token": "<s>"})
    assert template.render((USER,), variables={"extra": 7}) == "<s>TrueFalseFalse7"
    assert template.render((USER,), tools=[TOOL], add_generation_prompt=True) == "<s>FalseTrueFalse"


def test_messages_are_in_openai_shape() -> None:
    source = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    assert render(source, USER, CALLING, OBSERVED).splitlines() == [
        '{"role": "user", "content": "Hi"}',
        '{"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": {"name":'
        ' "add", "arguments": {"a": 1, "b": ["x", {"c": "é\\"\'<"}]}}, "id": "call00000"}]}',
        '{"role": "tool", "content": "2", "tool_call_id": "call00000", "name": "add"}',
    ]


def test_failed_observation_is_marked() -> None:
    failed = Message(role="tool", content="no file", tool_call_id="call00000", is_error=True)
    assert render("{{ messages[0].content }}", failed) == "ERROR: no file"


OBJECTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
# As DeepSeek's: text and arguments are added up, so the arguments must be text.
TEXTS = (
    "{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "{% if m.content is none %}{{ 'CALL' }}{% else %}{{ m.content + 'CALL' }}{% endif %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# As SmolLM2's, but writing calls: no content is not accepted.
CONTENT = (
    "{% for m in messages %}{{ m.role + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
JSON_ARGUMENTS = '{"a": 1, "b": ["x", {"c": "é\\"\'<"}]}'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (OBJECTS, "add" + JSON_ARGUMENTS),
        (TEXTS, "HiCALLadd" + JSON_ARGUMENTS),
        (CONTENT, "userHiassistantadd" + JSON_ARGUMENTS),
    ],
)
def test_calls_are_handed_over_as_the_template_wants_them(source: str, expected: str) -> None:
    assert render(source, USER, CALLING) == expected


def test_a_template_without_calls_gets_a_text() -> None:
    # As Granite 3.3's, which shows the tools but leaves calls to the content.
    assert render("{% for m in messages %}{{ m.role + m.content }};{% endfor %}", USER, CALLING) == (
        "userHi;assistant;"
    )


def test_raised_exception_is_named() -> None:
    source = (
        "{% if messages[0].role == 'user' %}{{ raise_exception('a system message comes first') }}{% endif %}"
    )
    with pytest.raises(TokenizerError, match="refused the conversation: a system message comes first"):
        render(source)


def test_failure_names_the_line() -> None:
    with pytest.raises(TokenizerError, match=r"UndefinedError|has no attribute|refused"):
        render("{{ messages[0].nothing.more }}")
    with pytest.raises(TokenizerError, match=r"TypeError.*line 2"):
        render("x\n{{ messages[0].content + 1 }}")


def test_invalid_jinja_is_refused() -> None:
    with pytest.raises(TokenizerError, match="not valid Jinja: line 2"):
        JinjaChatTemplate("x\n{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ (9 ** 9) ** 999999 }}",
        "{% set n = namespace(x=3) %}{% for i in range(64) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ lipsum(n=99999999) }}",
        "{% set n = namespace(t='xx') %}{% for i in range(64) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{% set n = namespace(t='xx') %}{% for i in range(64) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{% for i in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_hostile_templates_end_in_an_error(source: str) -> None:
    with pytest.raises(TokenizerError, match=r"template (refused|calls itself|failed)"):
        render(source)


def metadata(**more: Any) -> dict[str, Any]:
    return pairs_vocabulary("gpt-2") | more


def from_model(**more: Any) -> JinjaChatTemplate:
    data = metadata(**more)
    return JinjaChatTemplate.from_model(data, Gpt2Tokenizer(data))


def test_template_of_a_model_gets_its_special_tokens() -> None:
    template = from_model(
        **{"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    )
    assert template.own
    assert template.fallback_note() == ""
    assert template.render((USER,)) == "<s>Hi<|im_end|>"


def test_separate_template_for_tools() -> None:
    template = from_model(
        **{"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools <tool_call>"}
    )
    assert template.render((USER,)) == "plain"
    assert template.render((USER,), tools=[TOOL]) == "tools <tool_call>"
    assert "plain" in template.source
    assert "<tool_call>" in template.source


def test_model_without_template_speaks_chatml() -> None:
    template = from_model()
    assert not template.own
    assert "no chat template" in template.fallback_note()
    assert "ChatML, because the model has no chat template" in template.source
    text = template.render((USER, Message(role="assistant", content="Yo")), add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>assistant\n"
    )
    support = probe_template(template)
    assert (support.system, support.tools) == (True, False)


def test_chatml_ends_turns_with_eos_where_the_vocabulary_has_no_im_end() -> None:
    tokens = ["</s>" if token == "<|im_end|>" else token for token in metadata()["tokenizer.ggml.tokens"]]
    template = from_model(**{"tokenizer.ggml.tokens": tokens})
    assert template.render((USER,)) == "<|im_start|>user\nHi</s>\n"
    assert "TURN_END" in CHATML
