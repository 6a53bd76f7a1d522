"""Chat templates: the environment that templates are written for, refusals, and the sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from pagegraft.runtime.text import ChatTemplate, ChatTemplateError

USER = {"role": "user", "content": "Hi"}
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages or [USER], **options)


def test_roles_in_order_and_the_opening_of_the_answer() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHATML, messages) == turns + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == turns


def test_special_tokens_and_switches_are_variables() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{% if enable_thinking is false %}!{% endif %}"
    assert render(source) == "<s>Hi</s>"
    assert render(source, enable_thinking=False) == "<s>Hi</s>!"
    assert render(source, bos_token="") == "Hi</s>"


def test_blocks_are_trimmed() -> None:
    """A tag takes the spaces before it and the line break after it."""
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_tools_as_json_without_html_escapes() -> None:
    tool = {"type": "function", "function": {"name": "say", "description": "<b> & 'é' \"q\""}}
    assert render("{{ tools | tojson }}", tools=[tool]) == (
        '[{"type": "function", "function": {"name": "say", "description": "<b> & \'é\' \\"q\\""}}]'
    )
    indented = render("{% for tool in tools %}{{ tool.function | tojson(indent=2) }}{% endfor %}", tools=[tool])
    assert indented == '{\n  "name": "say",\n  "description": "<b> & \'é\' \\"q\\""\n}'
    assert render("{% if tools %}yes{% else %}no{% endif %}") == "no"


def test_tool_calls_and_documents() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    source = (
        "{% for m in messages %}{% if m.tool_calls is defined %}"
        "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}"
        "{% elif m.role == 'tool' %}<result>{{ m.content }}</result>{% endif %}{% endfor %}"
        "{% for d in documents %}[{{ d.text }}]{% endfor %}"
    )
    assert render(source, messages, documents=[{"text": "D"}]) == (
        '<call>{"name": "add", "arguments": {"a": 1}}</call><result>2</result>[D]'
    )


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    source = "{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}"
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"a": [1, "é"]}', "no json", "[1]", {"b": 2})]
    messages = [USER, {"role": "assistant", "tool_calls": calls}]
    assert render(source, messages) == '{"a": [1, "é"]};"no json";"[1]";{"b": 2};'
    assert calls[0]["function"]["arguments"] == '{"a": [1, "é"]}', "the caller's messages stay as they are"


@pytest.mark.parametrize("ending", ["", " ", "\n"])
def test_the_final_message_may_be_continued(ending: str) -> None:
    messages = [USER, {"role": "assistant", "content": "Hello, I" + ending}]
    begun = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello, I" + ending
    assert render(CHATML, messages, continue_final_message=True) == begun
    trimmed = CHATML.replace("message['content']", "message['content'] | trim")
    assert render(trimmed, messages, continue_final_message=True) == begun


def test_a_final_message_that_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="leaves out the last message"):
        render("{{ messages[0].content }}", [USER, USER | {"content": "x"}], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="needs a last message with text"):
        render(CHATML, [{"role": "assistant", "content": None}], continue_final_message=True)


def test_loop_controls_namespace_and_generation_block() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ ns.n }}"
    )
    assert render(source, [{"role": "system", "content": "S"}, USER]) == "Hi1"
    assert render("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}") == "21"


def test_date(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(render("{{ strftime_now('%d %b %Y') }}")) == len("29 Nov 2026")
    assert render("{{ strftime_now('%Y-%m-%d').split('-') | length }}") == "3"


def test_a_template_may_refuse() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    assert render(source) == "ok"
    with pytest.raises(ChatTemplateError, match="refuses these messages: System role not supported"):
        render(source, [{"role": "system", "content": "S"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(ChatTemplateError, match="sandbox"):
        render(source, messages)
    assert messages == [USER]


def test_a_template_sees_plain_values_only() -> None:
    class Text(str):
        def leak(self) -> str:
            return "leaked"

    assert render("{{ messages[0].content.leak is defined }}", [{"role": "user", "content": Text("Hi")}]) == "False"
    with pytest.raises(ChatTemplateError, match=r"must be JSON values, and .* is a object"):
        render("ok", [{"role": "user", "content": object()}])


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        ("{% if %}", [USER], "not valid jinja2.*line 1"),
        ("{{ messages[0].content + 1 }}", [USER], "fails on these messages: TypeError"),
        ("{{ messages[5].content.x }}", [USER], "fails on these messages: UndefinedError"),
        (CHATML, [{"content": "no role"}], 'message 0 .* must be an object with a "role"'),
        (CHATML, "Hi", "needs a list of messages"),
    ],
)
def test_errors_name_the_cause(source: str, messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source).render(messages)


@pytest.mark.parametrize("where", ["content", "arguments", "variable"])
def test_values_nested_too_deeply_are_refused(where: str) -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    more = {"content": {"content": deep}, "arguments": {"tool_calls": [call]}, "variable": {}}[where]
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        render("ok", [{**USER, **more}], **({"variable": deep} if where == "variable" else {}))


@pytest.mark.parametrize("calls", [5, "abc", {"function": 1}, [5]])
def test_tool_calls_that_are_none_are_left_to_the_template(calls: Any) -> None:
    assert render("ok", [{**USER, "tool_calls": calls}]) == "ok"


def test_an_empty_conversation_is_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="at least one"):
        ChatTemplate(CHATML).render([])
