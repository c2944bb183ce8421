"""Tool calls are read out of the text as it comes, whatever the chunks are, and nothing is lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.server.tools import ToolCallParser, held_back

WEATHER = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo {north}", "note": "a \\"b\\" </x>"}}\n</tool_call>'
)
CLOCK = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
ODD = '<tool_call>{"arguments": {"a": [1, 2]}, "name": "clock"}</tool_call>'
UNKNOWN = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
NAMES = frozenset({"weather", "clock"})


def run(text: str, cuts: list[int]) -> tuple[str, dict[int, tuple[str, str]]]:
    parser = ToolCallParser(NAMES)
    edges = [0, *sorted(cuts), len(text)]
    content, calls = "", {}
    parts = [parser.push(text[a:b]) for a, b in itertools.pairwise(edges)]
    for part in [*parts, parser.finish()]:
        content += part.content
        for delta in part.calls:
            name, arguments = calls.get(delta.index, (delta.name, ""))
            assert (delta.index in calls) != (delta.name is not None), "the name comes once, first"
            calls[delta.index] = (name, arguments + delta.arguments)
    return content, calls


@given(st.lists(st.integers(0, 400), max_size=30))
def test_any_chunks_give_the_same_calls(cuts: list[int]) -> None:
    text = f"Let me look.{WEATHER}and{CLOCK} < not a <tool tag {ODD}."
    content, calls = run(text, [c for c in cuts if c <= len(text)])
    assert content == "Let me look.and < not a <tool tag ."
    assert [name for name, _ in calls.values()] == ["weather", "clock", "clock"]
    assert json.loads(calls[0][1]) == {"city": "Oslo {north}", "note": 'a "b" </x>'}
    assert [json.loads(a) for _, a in list(calls.values())[1:]] == [{}, {"a": [1, 2]}]


@pytest.mark.parametrize("text", [UNKNOWN, "<tool_call>no json</tool_call>", "<tool_call>{half", "a <tool_c", "<"])
def test_what_is_no_call_stays_content(text: str) -> None:
    for cuts in ([], list(range(len(text)))):
        assert run(text, cuts) == (text, {})


def test_a_call_that_was_cut_gives_what_there_is() -> None:
    content, calls = run('<tool_call>{"name": "clock", "arguments": {"a": 1', [])
    assert (content, calls) == ("", {0: ("clock", '{"a": 1')})


def test_arguments_are_streamed_as_they_are_written() -> None:
    parser = ToolCallParser(NAMES)
    first = parser.push('<tool_call>\n{"name": "weather", "arguments": {"city": "Os')
    assert [(d.name, d.arguments) for d in first.calls] == [("weather", ""), (None, '{"city": "Os')]
    assert [d.arguments for d in parser.push('lo"}').calls] == ['lo"}']
    assert parser.push("}\n</tool_call>").calls == ()


def test_held_back_is_the_longest_beginning_of_the_tag() -> None:
    assert [held_back(t, "<tool_call>") for t in ("", "x", "x<", "<<tool", "<tool_call")] == [0, 0, 1, 5, 10]
