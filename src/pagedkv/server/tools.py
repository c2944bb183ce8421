"""Tool calls in the Hermes and Qwen format: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

:class:`ToolCallParser` reads the text as it comes and gives back what is content and what is a call. Text that
might still become a tag is held back; the arguments go out as they are written, so a client sees them grow.
What looks like a call and is none (no JSON, no name, a tool that was not offered) stays content, word for word:
nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedkv.engine.structured import JSON_STYLE

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CallDelta:
    """The part of call ``index`` that is new; ``id`` and ``name`` are set in a call's first part only."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Parsed:
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


@dataclass
class JsonSpan:
    """Finds where a JSON value ends, a character at a time: the depth of brackets outside strings."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def push(self, text: str) -> int | None:
        """The number of characters of ``text`` up to and with the value's last one, or None if it goes on."""
        for position, character in enumerate(text, 1):
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.escaped = character == "\\"
                self.in_string = character != '"'
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return position
        return None


def _head(body: str) -> tuple[str, int] | None:
    """(name, where the arguments object begins) once both can be told from an unfinished call."""
    marker = '"arguments"'
    at = body.find(marker)
    if at < 0:
        return None
    begin = body.find("{", at + len(marker))
    if begin < 0:
        return None
    try:  # the members before the arguments, closed by hand, are a whole object
        members = json.loads(body[:at].rstrip().rstrip(",").rstrip() + "}")
    except ValueError:
        return None
    name = members.get("name") if isinstance(members, dict) else None
    return (name, begin) if isinstance(name, str) else None


@dataclass
class ToolCallParser:
    """``names``: the tools on offer. Feed ``push`` with new text and ``finish`` once at the end."""

    names: frozenset[str]
    num_calls: int = 0
    _text: str = ""
    _inside: bool = False
    _sent: int = -1  # characters of the body that went out as arguments; -1 before the head is known
    _span: JsonSpan = field(default_factory=JsonSpan)
    _done: bool = False

    def push(self, text: str) -> Parsed:
        self._text += text
        content, calls = "", []
        while True:
            before = (self._inside, len(self._text))
            if self._inside:
                new, leftover = self._read_call()
                calls += new
                content += leftover
            else:
                content += self._read_content()
            if (self._inside, len(self._text)) == before:
                return Parsed(content, tuple(calls))

    def finish(self) -> Parsed:
        """What was held back: content if no call had begun, else the end of a call that was cut."""
        rest, self._text = self._text, ""
        if not self._inside:
            return Parsed(rest)
        if self._sent < 0:
            whole = self._whole_call(rest)
            return Parsed(calls=(whole,)) if whole else Parsed(OPEN + rest)
        return Parsed(calls=() if self._done else (CallDelta(self.num_calls - 1, rest[self._sent :]),))

    def _read_content(self) -> str:
        at = self._text.find(OPEN)
        if at >= 0:
            content, self._text = self._text[:at], self._text[at + len(OPEN) :]
            self._inside, self._sent, self._span, self._done = True, -1, JsonSpan(), False
            return content
        keep = held_back(self._text, OPEN)
        content = self._text[: len(self._text) - keep]
        self._text = self._text[len(self._text) - keep :]
        return content

    def _read_call(self) -> tuple[list[CallDelta], str]:
        close = self._text.find(CLOSE)
        body = self._text if close < 0 else self._text[:close]
        calls: list[CallDelta] = []
        if self._sent < 0 and (head := _head(body)) and head[0] in self.names:
            name, self._sent = head
            calls.append(CallDelta(self.num_calls, "", f"call_{uuid.uuid4().hex[:24]}", name))
            self.num_calls += 1
        if self._sent >= 0 and not self._done:
            safe = len(body) if close >= 0 else len(body) - held_back(body, CLOSE)
            new = body[self._sent : safe]
            end = self._span.push(new)
            self._done = end is not None
            new = new[:end]
            self._sent += len(new)
            if new:
                calls.append(CallDelta(self.num_calls - 1, new))
        if close < 0:
            return calls, ""
        leftover = ""
        if self._sent < 0:
            whole = self._whole_call(body)
            if whole:
                calls.append(whole)
            else:
                leftover = OPEN + body + CLOSE
        self._text = self._text[close + len(CLOSE) :]
        self._inside = False
        return calls, leftover

    def _whole_call(self, body: str) -> CallDelta | None:
        """A call whose members stand in another order than usual can only be read when it is complete."""
        try:
            call = json.loads(body)
        except ValueError:
            return None
        if not isinstance(call, dict) or call.get("name") not in self.names:
            return None
        index, self.num_calls = self.num_calls, self.num_calls + 1
        arguments = call.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return CallDelta(index, text, f"call_{uuid.uuid4().hex[:24]}", call["name"])


def call_grammar(tools: Sequence[dict[str, Any]]) -> str:
    """A Lark grammar (llguidance's dialect) for exactly one call of one of ``tools``, arguments by their schema."""
    rules = [f"start: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        function = tool["function"]
        schema = json.dumps({**(function.get("parameters") or {"type": "object"}), "x-guidance": JSON_STYLE})
        head = json.dumps(f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": ')
        rules.append(f"call_{i}: {head} args_{i} {json.dumps('}' + chr(10) + CLOSE)}")
        rules.append(f"args_{i}: %json {schema}")
    return "\n".join(rules)


def tool_prompt(tools: Sequence[dict[str, Any]]) -> str:
    """The instruction for models whose chat template does not take tools."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, one JSON signature a line:\n"
        f"{listed}\n"
        "To call one, answer with nothing but\n"
        f'{OPEN}\n{{"name": <function name>, "arguments": <object with the arguments>}}\n{CLOSE}'
    )
