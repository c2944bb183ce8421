"""Chat templates: transformers' text for templates in the manner of several families; safe, bounded, clear errors."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SPECIAL, tiny_tokenizer, write_tokenizer

from pagedkv.errors import ChatTemplateError
from pagedkv.model.chat_template import ChatTemplate
from pagedkv.model.tokenizer import tokenizer_from_files

CHATML = """{%- for turn in messages %}
    {%- if loop.first and turn.role != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + turn['role'] + '\\n' + turn['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- set offset = 0 %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set offset = 1 %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\n' }}
{{- 'Day: ' + (date_string if date_string is defined else 'none') + '\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- system + '<|eot|>' }}
{%- for message in messages[offset:] %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n' + call.name + '(' + (call.arguments | tojson) + ')<|eot|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '<|start|>ipython<|end|>\\n\\n' + message.content + '<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"""

QWEN3 = """{%- macro show(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}
        {%- for part in content -%}{%- if 'text' in part -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = show(message.content) %}
    {%- if message.role == 'assistant' and message.reasoning_content is defined and loop.index0 > ns.last %}
        {%- set content = '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

PLAIN = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% else %}
    [{{ message['role'] | upper }}] {{ message['content'] }}
{% endif %}
{% endfor %}
"""

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string", "what": "<ü>"}}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Why is the sky blue?"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi & <b>'x'</b> \"y\""}],
    "turns": [
        {"role": "user", "content": "1\n\n2"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "ü日🎉 {{ not a template }}"},
    ],
    "tool": [
        {"role": "user", "content": "Weather in Aarhus?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Århus"}}}],
        },
        {"role": "tool", "content": '{"degrees": 7}', "name": "weather"},
    ],
    "thoughts": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "\nadd them\n", "refusal": None},
    ],
}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "plain": PLAIN}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("hf")
    write_tokenizer(directory, bos_token=SPECIAL[0])
    return transformers.AutoTokenizer.from_pretrained(directory)


def ours(template: str) -> ChatTemplate:
    return ChatTemplate(template, {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]})


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str, conversation: str, hf: Any) -> None:
    messages, template = CONVERSATIONS[conversation], TEMPLATES[name]
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": [TOOL], "date_string": "1 May"},
        {"add_generation_prompt": True, "enable_thinking": False, "tools": [TOOL, TOOL]},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        expected = hf.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
        assert ours(template).render(messages, **options) == expected


def test_content_parts_as_a_list_where_the_template_walks_them_else_joined(hf: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    expected = hf.apply_chat_template(messages, chat_template=QWEN3, tokenize=False, add_generation_prompt=True)
    assert ours(QWEN3).render(messages) == expected
    joined = [{"role": "user", "content": "one\ntwo"}]
    assert ours(CHATML).render(messages) == ours(CHATML).render(joined)
    assert ours(CHATML).render([{"role": "user", "content": ["one", "two"]}]) == ours(CHATML).render(joined)
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]\.content has a part of type 'image_url'"):
        ours(CHATML).render([{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "x"}}]}])


def test_continue_final_message_with_parts_and_with_trimmed_text(hf: Any) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Once upon a "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for template in (CHATML, LLAMA3):
        expected = hf.apply_chat_template(turns, chat_template=template, tokenize=False, **options)
        assert ours(template).render(turns, **options) == expected
    parts = [turns[0], {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}]
    expected = hf.apply_chat_template(parts, chat_template=QWEN3, tokenize=False, **options)
    assert ours(QWEN3).render(parts, **options) == expected
    for bad, words in (
        ([], "no text"),
        ([{"role": "assistant"}], "no text"),
        ([{"role": "user", "content": "x"}], "does not show"),
    ):
        with pytest.raises(ChatTemplateError, match=words):
            ours("{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}").render(bad, **options)
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        ours(CHATML).render(turns, continue_final_message=True)


def test_the_callers_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", "content": "y"}]
    before = json.dumps(messages)
    ours(QWEN3).render(messages, continue_final_message=True, add_generation_prompt=False)
    assert json.dumps(messages) == before


def test_b87_the_template_refuses_in_its_own_words() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match=r"^no system role here$"):
        ours(template).render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "does not compile"),
        ("{{ messages | nosuchfilter }}", "does not compile"),
        ("{{ messages[0].content + 3 }}", "TypeError"),
        ("{{ messages[0].nothing.at_all }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'other' %}", "failed on these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError|loop rounds"),
    ],
)
def test_b87_a_template_that_breaks_is_one_kind_of_error(template: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ours(template).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("messages", [[{"content": "x"}], ["hi"], [{"role": 3, "content": "x"}], [None]], ids=str)
def test_b87_messages_of_another_shape_are_named(messages: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]"):
        ours(CHATML).render(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[]] recursive %}{{ loop([[], [], []]) }}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for a in range(999999999) %}{% endfor %}",
    ],
)
def test_b87_an_endless_template_ends(template: str) -> None:
    start = time.monotonic()
    with pytest.raises(ChatTemplateError):
        ours(template).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - start < 60  # it would be hours, or all memory


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
        "{{ messages[0].update(content='x') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ tick }}{{ self.__init__.__globals__ }}",
        "{% set messages[0].content = 'x' %}",
    ],
)
def test_b87_a_template_cannot_leave_its_box(template: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    try:
        text = ours(template).render(messages)
    except ChatTemplateError:
        text = ""
    assert "module" not in text
    assert "function" not in text
    assert messages == [{"role": "user", "content": "hello"}]


def test_b87_what_templates_use() -> None:
    def render(template: str, **variables: Any) -> str:
        return ours(template).render([{"role": "user", "content": "x"}], **variables)

    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{{ {'a': '<é>', 'b': [1, none, true]} | tojson }}") == '{"a": "<é>", "b": [1, null, true]}'
    loop = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
    assert render(loop + "{% endfor %}") == "023"
    assert render("{{ bos_token }}|{{ nothing }}|{{ mode }}", mode="deep") == f"{SPECIAL[0]}||deep"


def test_b87_no_template_is_a_clear_hint_and_prompts_still_work(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=...)
    tokenizer = tokenizer_from_files(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match=r"no chat template.*completions"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert tokenizer.encode("x")
    assert tokenizer.render_chat([{"role": "user", "content": "x"}], chat_template="{{ messages[0].content }}!") == "x!"


def test_b87_a_list_of_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_tokenizer(tmp_path, chat_template=named)
    tokenizer = tokenizer_from_files(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=[TOOL]) == "tools"
    assert tokenizer.render_chat(messages, chat_template="tool_use") == "tools"
    write_tokenizer(tmp_path, chat_template=[{"name": "rag", "template": "r"}])
    with pytest.raises(ChatTemplateError, match="rag"):
        tokenizer_from_files(tmp_path).render_chat(messages)


def test_b87_template_files_win_over_the_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    tokenizer = tokenizer_from_files(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "from the file"
    assert tokenizer.render_chat(messages, tools=[TOOL]) == "with tools"


def test_a_tokenizer_without_special_names_renders(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, tiny_tokenizer(), eos_token=..., pad_token=...)
    tokenizer = tokenizer_from_files(tmp_path)
    assert tokenizer.eos_ids == ()
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]).endswith("assistant\n")
