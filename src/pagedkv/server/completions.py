"""``POST /v1/completions``."""

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
from pagedkv.server.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from pagedkv.server.replies import STREAMS, event_stream, json_reply
from pagedkv.server.route import BodyRoute
from pagedkv.server.schema import (
    MAX_PROMPTS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from pagedkv.server.serving import Delta, Serving
from pagedkv.server.structured import with_structure

router = APIRouter(route_class=BodyRoute)


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts as the engine takes them; each of its four spellings in OpenAI's API ends here.

    Raises:
        InvalidRequest: none at all, an empty one, or more than ``MAX_PROMPTS``.
    """
    prompt: Any = body.prompt
    single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts = [prompt] if single else list(prompt)
    if not prompts:
        raise InvalidRequest("prompt: there is none; give a string or a list of token ids", field="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt: {len(prompts)} prompts in one request; the limit is {MAX_PROMPTS}", field="prompt"
        )
    return prompts


def parameters(body: CompletionRequest) -> flow.Params:
    for name in ("suffix", "best_of"):
        value = getattr(body, name)
        if value not in (None, "", body.n or 1):
            raise InvalidRequest(f"{name}: {value!r} is not supported here; leave it out", field=name)
    if body.echo and body.prompt_logprobs is None and (body.logprobs is not None or body.max_tokens == 0):
        body = body.model_copy(update={"prompt_logprobs": body.logprobs or 0})
    return with_structure(flow.sampling_params(body, max_tokens=body.max_tokens, logprobs=body.logprobs), body)


@dataclass
class Answer:
    """Turns the engine's outputs into choices, for a stream and for a whole answer alike."""

    serving: Serving
    body: CompletionRequest
    id: str
    model: str
    num_choices: int  # per prompt
    totals: flow.Totals
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)

    def choice(self, delta: Delta) -> CompletionChoice:
        first = delta.first_token == 0 and delta.start == 0 and delta.index not in self._offsets
        prefix = self._echo(delta.request) if first and self.body.echo else ""
        return CompletionChoice(
            index=delta.index,
            text=prefix + delta.text,
            logprobs=self._logprobs(delta, first, len(prefix)),
            finish_reason=delta.output.finish_reason,
            stop_reason=delta.output.stop_reason,
            token_ids=list(delta.token_ids) if self.body.return_token_ids else None,
            prompt_token_ids=list(delta.request.prompt_token_ids) if self.body.return_token_ids and first else None,
            prompt_logprobs=prompt_logprobs(delta.request.prompt_logprobs)
            if first and self.body.prompt_logprobs is not None
            else None,
        )

    def _echo(self, request: RequestOutput) -> str:
        if request.prompt is not None:
            return request.prompt
        return self.serving.llm.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(self, delta: Delta, first: bool, prefix: int) -> CompletionLogprobs | None:
        tokenizer = self.serving.llm.tokenizer
        if first:
            skip = self.body.skip_special_tokens is not False
            self._offsets[delta.index] = TextOffsets(tokenizer, skip_special_tokens=skip, start=prefix)
        count = self.body.logprobs
        if count is None:
            return None
        offsets = self._offsets[delta.index]
        own = completion_logprobs(delta.token_ids, delta.logprobs or [], count, offsets, tokenizer)
        entries = delta.request.prompt_logprobs
        if not (first and self.body.echo and entries is not None):
            return own
        of_prompt = TextOffsets(tokenizer, skip_special_tokens=False)
        prompt = completion_logprobs(delta.request.prompt_token_ids, entries, count, of_prompt, tokenizer)
        return CompletionLogprobs(
            **{name: getattr(prompt, name) + getattr(own, name) for name in CompletionLogprobs.model_fields}
        )

    def reply(self, choices: Sequence[CompletionChoice], *, usage: bool) -> Completion:
        counted = self.totals.usage() if usage else None
        return Completion(id=self.id, created=self.created, model=self.model, choices=list(choices), usage=counted)

    async def chunks(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncIterator[Completion]:
        options = self.body.stream_options
        running_usage = options is not None and options.continuous_usage_stats
        progress = flow.Progress()
        async for which, output in outputs:
            self.totals.see(which, output)
            for delta in progress.deltas(which * self.num_choices, output):
                yield self.reply([self.choice(delta)], usage=running_usage)
        if options is not None and options.include_usage:
            yield self.reply([], usage=True)


@router.post("/v1/completions", response_model=Completion, responses=STREAMS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    serving: Serving = request.app.state.serving
    model = serving.check_model(body.model)
    prompts, params = prompts_of(body), parameters(body)
    sources = await flow.start(serving, request, body, prompts, params)
    name = flow.public_id(request, body, "cmpl")
    answer = Answer(serving, body, name, model, body.n or 1, flow.totals_of(request, name))
    if body.stream:
        outputs = await flow.begun(request, flow.merge(sources))
        return event_stream(answer.chunks(outputs))
    finals = await flow.until_gone(request, flow.collect(sources, answer.totals))
    if finals is None:
        return Response(status_code=499)
    choices = []
    for which, output in enumerate(finals):
        choices += [answer.choice(d) for d in flow.Progress().deltas(which * answer.num_choices, output)]
    return json_reply(answer.reply(choices, usage=True))
