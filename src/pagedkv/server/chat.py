"""``POST /v1/chat/completions``: messages through the chat template, tool calls read out of the answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagedkv.engine.outputs import RequestOutput
from pagedkv.errors import InvalidRequest
from pagedkv.server import serving as flow
from pagedkv.server.logprobs import chat_logprobs, prompt_logprobs
from pagedkv.server.replies import STREAMS, event_stream, json_reply
from pagedkv.server.route import BodyRoute
from pagedkv.server.schema import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionReply,
    Message,
    NamedToolChoice,
    Tool,
    ToolCallReply,
)
from pagedkv.server.serving import Delta, Serving
from pagedkv.server.structured import with_structure
from pagedkv.server.tools import CallDelta, Parsed, ToolCallParser, tool_prompt

router = APIRouter(route_class=BodyRoute)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: text parts joined, absent members left out.

    Raises:
        InvalidRequest: no messages, or a content part that is not text (this server has no vision models).
    """
    if not messages:
        raise InvalidRequest("messages: there is none; a chat needs at least one", field="messages")
    plain = []
    for i, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text" or part.text is None:
                    raise InvalidRequest(
                        f"messages.{i}.content: a part of type {part.type!r}; only text parts are taken",
                        field=f"messages.{i}.content",
                    )
            content = "".join(part.text or "" for part in content)
        if content is None and not message.tool_calls:
            raise InvalidRequest(f"messages.{i}.content: null without tool_calls", field=f"messages.{i}.content")
        members = message.model_dump(exclude_none=True, exclude={"content"})
        plain.append({**members, "content": content or ""})
    return plain


def offered_tools(body: ChatCompletionRequest) -> list[Tool]:
    """The tools that the answer may call: none under ``tool_choice`` none, one where one is named."""
    tools = body.tools or []
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise InvalidRequest(f"tool_choice: no tool is named {choice.function.name!r}", field="tool_choice")
        return named
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice: 'required' without tools", field="tool_choice")
    return [] if choice == "none" else list(tools)


def prompt_of(serving: Serving, request: Request, body: ChatCompletionRequest) -> list[int]:
    """The token ids of the chat; ids that this server generated come back as they were (see engine/turns)."""
    messages = plain_messages(body.messages)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] if body.tool_choice != "none" else []
    tokenizer = serving.llm.tokenizer
    if tools and not tokenizer.template_takes_tools:
        messages = [{"role": "system", "content": tool_prompt(tools)}, *messages]
        tools = []
    return serving.llm.chat_prompt(
        messages,
        cache_salt=body.cache_salt,
        tenant=flow.tenant_of(serving, request),
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        **(body.chat_template_kwargs or {}),
    )


def parameters(body: ChatCompletionRequest, tools: Sequence[Tool]) -> flow.Params:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", field="top_logprobs")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = flow.sampling_params(body, max_tokens=max_tokens, logprobs=logprobs)
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice)
    return with_structure(params, body, [tool.model_dump() for tool in tools] if forced else None)


@dataclass
class Answer:
    serving: Serving
    body: ChatCompletionRequest
    id: str
    model: str
    tools: frozenset[str]
    totals: flow.Totals
    created: int = field(default_factory=lambda: int(time.time()))
    _parsers: dict[int, ToolCallParser] = field(default_factory=dict)

    def _parse(self, delta: Delta) -> Parsed:
        if not self.tools:
            return Parsed(delta.text)
        parser = self._parsers.setdefault(delta.index, ToolCallParser(self.tools))
        new = parser.push(delta.text)
        if delta.output.finish_reason is None:
            return new
        rest = parser.finish()
        return Parsed(new.content + rest.content, new.calls + rest.calls)

    def _finish_reason(self, delta: Delta) -> str | None:
        parser = self._parsers.get(delta.index)
        called = parser is not None and parser.num_calls > 0
        reason = delta.output.finish_reason
        return "tool_calls" if called and reason == "stop" else reason

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(
            delta.token_ids, delta.logprobs or [], self.body.top_logprobs or 0, self.serving.llm.tokenizer
        )

    def delta(self, delta: Delta) -> ChatDelta:
        parsed = self._parse(delta)
        calls = [_part(call) for call in parsed.calls]
        message = ChatMessage(content=parsed.content or (None if calls else ""), tool_calls=calls or None)
        return ChatDelta(
            index=delta.index,
            delta=message,
            logprobs=self._logprobs(delta),
            finish_reason=self._finish_reason(delta),
            stop_reason=delta.output.stop_reason,
            token_ids=list(delta.token_ids) if self.body.return_token_ids else None,
        )

    def choice(self, delta: Delta) -> ChatChoice:
        parsed = self._parse(delta)
        calls: dict[int, CallDelta] = {}
        for call in parsed.calls:
            first = calls.get(call.index, call)
            arguments = call.arguments if first is call else first.arguments + call.arguments
            calls[call.index] = CallDelta(call.index, arguments, first.id, first.name)
        whole = [_part(call).model_copy(update={"index": None}) for call in calls.values()]
        return ChatChoice(
            index=delta.index,
            message=ChatMessage(
                role="assistant", content=parsed.content or (None if whole else ""), tool_calls=whole or None
            ),
            logprobs=self._logprobs(delta),
            finish_reason=self._finish_reason(delta),
            stop_reason=delta.output.stop_reason,
            token_ids=list(delta.token_ids) if self.body.return_token_ids else None,
        )

    def chunk(self, choices: Sequence[ChatDelta], *, usage: bool) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=list(choices),
            usage=self.totals.usage() if usage else None,
        )

    async def chunks(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncIterator[ChatCompletionChunk]:
        options = self.body.stream_options
        running_usage = options is not None and options.continuous_usage_stats
        progress, greeted = flow.Progress(), set[int]()
        async for which, output in outputs:
            self.totals.see(which, output)
            for delta in progress.deltas(0, output):
                if delta.index not in greeted:
                    greeted.add(delta.index)
                    hello = ChatDelta(index=delta.index, delta=ChatMessage(role="assistant", content=""))
                    yield self.chunk([hello], usage=running_usage)
                yield self.chunk([self.delta(delta)], usage=running_usage)
        if options is not None and options.include_usage:
            yield self.chunk([], usage=True)

    def whole(self, output: RequestOutput) -> ChatCompletion:
        ids = self.body.return_token_ids
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self.choice(delta) for delta in flow.Progress().deltas(0, output)],
            usage=self.totals.usage(),
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=list(output.prompt_token_ids) if ids else None,
        )


def _part(call: CallDelta) -> ToolCallReply:
    function = FunctionReply(name=call.name, arguments=call.arguments)
    return ToolCallReply(index=call.index, id=call.id, type="function" if call.id else None, function=function)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMS)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    serving: Serving = request.app.state.serving
    model = serving.check_model(body.model)
    tools = offered_tools(body)
    params = parameters(body, tools)
    sources = await flow.start(serving, request, body, [prompt_of(serving, request, body)], params)
    names = frozenset(tool.function.name for tool in tools)
    name = flow.public_id(request, body, "chatcmpl")
    answer = Answer(serving, body, name, model, names, flow.totals_of(request, name))
    if body.stream:
        outputs = await flow.begun(request, flow.merge(sources))
        return event_stream(answer.chunks(outputs))
    finals = await flow.until_gone(request, flow.collect(sources, answer.totals))
    return Response(status_code=499) if finals is None else json_reply(answer.whole(finals[0]))
