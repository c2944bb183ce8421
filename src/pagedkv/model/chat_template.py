"""Chat templates: messages -> the text that the model was trained on.

A template is foreign code that came with the weights. It runs in jinja2's immutable sandbox, with what Hugging Face
templates expect (``tojson``, ``strftime_now``, ``raise_exception``, loop controls, ``generation`` blocks), sees plain
JSON values only, and has a budget of loop rounds and macro calls: an endless template ends with an error.
Whatever goes wrong inside is a ``ChatTemplateError`` that carries the template's own words.

Not bounded: the memory that one call of a string method can ask for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pagedkv.errors import ChatTemplateError

if TYPE_CHECKING:
    import jinja2

MAX_ROUNDS = 1_000_000  # loop rounds and macro calls of one rendering
MAX_PRODUCT = 10_000_000  # length of a repeated string or list, bits of a power

_CONTINUE = "\ue000continue\ue001 "  # private-use characters; the space tells whether the template trims
_BUDGET = "rounds left"  # not an identifier, so no template can read or set it


class ChatTemplate:
    """One compiled template. ``special_tokens``: what ``bos_token`` and its kin are inside it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        import jinja2

        self.source = source
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
            self._wants_parts = _loops_over_content(self._environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of ``messages``; ``variables`` are the template's own switches (``enable_thinking``, ...).

        continue_final_message leaves the last message open, so that the model goes on with it; it excludes
        add_generation_prompt. Raises ChatTemplateError.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        prepared = [self._message(index, message) for index, message in enumerate(messages)]
        if continue_final_message:
            final = _mark_final(prepared)
        try:
            text: str = self._template.render(
                {
                    **self._special_tokens,
                    **_plain(variables),
                    "messages": prepared,
                    "tools": _plain(tools) if tools else None,
                    "documents": _plain(variables.get("documents")),
                    "add_generation_prompt": add_generation_prompt,
                    _BUDGET: [MAX_ROUNDS],
                }
            )
        except Exception as error:  # foreign code: anything can happen in it
            raise ChatTemplateError(_explain(error)) from error
        return _cut_at_mark(text, final) if continue_final_message else text

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """One message as plain JSON, without the keys that are None: OpenAI clients send them, templates choke."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"messages[{index}] must be an object with a role, not {message!r}")
        plain = {str(key): _plain(value) for key, value in message.items() if value is not None}
        thoughts = next((plain[name] for name in ("reasoning_content", "thinking", "reasoning") if name in plain), None)
        if thoughts is not None:
            plain.setdefault("reasoning_content", thoughts)
        content = plain.get("content")
        if isinstance(content, list):
            parts = [_text_part(index, part) for part in content]
            plain["content"] = parts if self._wants_parts else "\n".join(part["text"] for part in parts)
        return plain


def _text_part(index: int, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ChatTemplateError(f"messages[{index}].content has a part of type {kind!r}; this model reads text only")
    return {"type": "text", **part}


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Append the mark to the text of the last message, in place; returns that text as it was."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _CONTINUE
        return text
    if not isinstance(content, str):
        raise ChatTemplateError("continue_final_message: the last message has no text to go on with")
    messages[-1]["content"] = content + _CONTINUE
    return content


def _cut_at_mark(text: str, final: str) -> str:
    mark = text.rfind(_CONTINUE.rstrip())
    if mark < 0 or final.strip() not in text:
        raise ChatTemplateError("continue_final_message: the template does not show the last message as it is")
    trimmed = not text.startswith(_CONTINUE, mark)
    return text[:mark].rstrip() if trimmed else text[:mark]


def _plain(value: Any) -> Any:
    """JSON values rebuilt from exact types: no object with methods of its own reaches the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def _explain(error: Exception) -> str:
    import jinja2

    if isinstance(error, _RefusalError):
        return str(error)
    if isinstance(error, jinja2.exceptions.SecurityError):
        return f"the chat template did something that is not allowed: {error}"
    return f"the chat template failed on these messages: {type(error).__name__}: {error}"


class _RefusalError(Exception):
    """The template's own ``raise_exception``, or the end of its budget."""


def _raise_exception(message: Any) -> None:
    raise _RefusalError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    """The sandbox. jinja2 is imported here, so that a program that never chats does not load it."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %} ... {% endgeneration %}`` marks what an assistant wrote, for training; here it is text."""

        tags = {"generation"}  # noqa: RUF012  jinja2's interface

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                for many, times in ((left, right), (right, left)):
                    if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                        _check_size(len(many) * times)
            elif isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() * right)
            return super().call_binop(context, operator, left, right)

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            loops: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
            for node in loops:
                tick = nodes.ExprStmt(nodes.Filter(nodes.Const(0), "tick", [], [], None, None), lineno=node.lineno)
                node.body.insert(0, tick.set_environment(self))
            return tree

    @jinja2.pass_context
    def tick(context: Context, _: Any) -> None:
        budget = context.parent[_BUDGET]
        budget[0] -= 1
        if budget[0] < 0:
            raise _RefusalError(f"the chat template ran for more than {MAX_ROUNDS} loop rounds; it may be endless")

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters.update(tojson=_tojson, tick=tick)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.globals.pop("lipsum", None)
    return environment


def _check_size(size: int) -> None:
    if size > MAX_PRODUCT:
        raise _RefusalError(f"the chat template made a value of size {size}; the limit is {MAX_PRODUCT}")


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template walks the parts of a content list itself; if not, parts are joined before it sees them."""
    from jinja2 import nodes

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in aliases

    aliases: set[str] = set()
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            aliases.add(assign.target.name)
    for call in tree.find_all(nodes.Call):  # a macro that is handed the content knows it by another name
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            given = zip(macro.args, call.args, strict=False)
            aliases.update(parameter.name for parameter, value in given if is_content(value))
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
