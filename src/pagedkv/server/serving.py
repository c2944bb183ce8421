"""What the routes share: the state of the server, and the way from a request's body to the engine and back.

A completion with several prompts, or a chat, becomes one or more engine requests. Their outputs come back
merged: :func:`stream` gives what is new as it comes, :func:`collect` waits for the end. When the client goes
away, both end the engine's work within a step: the iterators are closed, and closing one aborts its request.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from pagedkv.async_llm import AsyncLLM
from pagedkv.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from pagedkv.engine.params import BeamSearchParams, SamplingParams
from pagedkv.errors import InvalidRequest
from pagedkv.server.config import ServerConfig
from pagedkv.server.insight import Asker, Insight
from pagedkv.server.schema import GenerationBody, Usage

Params = SamplingParams | BeamSearchParams
T = TypeVar("T")

_SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output"),
)  # the same name in the body and in SamplingParams


@dataclass
class Serving:
    """One per app, at ``app.state.serving``. ``num_active``: requests being answered now."""

    llm: AsyncLLM
    config: ServerConfig
    names: tuple[str, ...]
    started: int = field(default_factory=lambda: int(time.time()))
    num_active: int = 0
    draining: bool = False
    insight: Insight = field(default_factory=Insight)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. An unknown one is a 404, as OpenAI's clients expect."""
        if name is None or name in self.names:
            return name or self.names[0]
        raise ModelNotServed(name, self.names)


class ModelNotServed(InvalidRequest):
    def __init__(self, name: str, names: Sequence[str]) -> None:
        super().__init__(f"model: {name[:200]!r} is not served here; there is {', '.join(names)}", field="model")


def sampling_params(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> Params:
    """The body's fields as the engine's parameters; a field that is absent or null keeps the default.

    Raises:
        InvalidRequest: a value out of its range; ``field`` is the name in the body.
    """
    if body.use_beam_search:
        if max_tokens is None:
            raise InvalidRequest("max_tokens: beam search needs a number", field="max_tokens")
        return BeamSearchParams(
            beam_width=body.n or 1,
            max_tokens=max_tokens,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            temperature=body.temperature or 0.0,
            ignore_eos=bool(body.ignore_eos),
        )
    values = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    given = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def public_id(request: Request, body: GenerationBody, prefix: str) -> str:
    """The id in the answer: the caller's own where one was given, behind OpenAI's prefix, else a new one."""
    given = body.request_id or getattr(request.state, "request_id", None)
    return f"{prefix}-{given[:128]}" if given else new_id(prefix)


@dataclass(frozen=True)
class Delta:
    """What is new in one choice since the last one: ``start`` is where ``text`` begins in the whole text."""

    index: int
    text: str
    start: int
    token_ids: Sequence[int]
    first_token: int
    logprobs: Sequence[TokenLogprobs] | None
    output: CompletionOutput
    request: RequestOutput


class Progress:
    """How much of each choice went out already; turns cumulative outputs into deltas."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int, bool]] = {}

    def deltas(self, offset: int, request: RequestOutput) -> list[Delta]:
        """``offset``: what to add to a choice's index (completions with several prompts number across them)."""
        new = []
        for output in request.outputs:
            index = offset + output.index
            chars, tokens, done = self._sent.get(index, (0, 0, False))
            ended = output.finish_reason is not None
            if done or (len(output.text) == chars and len(output.token_ids) == tokens and not ended):
                continue
            self._sent[index] = (len(output.text), len(output.token_ids), ended)
            logprobs = None if output.logprobs is None else output.logprobs[tokens:]
            text, ids = output.text[chars:], output.token_ids[tokens:]
            new.append(Delta(index, text, chars, ids, tokens, logprobs, output, request))
        return new


class Totals:
    """Tokens of all the engine requests behind one HTTP request; the latest output of each counts.

    ``served`` is kept up to date for the access log, also when the client goes away half-way.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._seen: dict[int, tuple[int, int]] = {}

    def see(self, which: int, output: RequestOutput) -> None:
        served = self._served
        cached, generated = self._seen.get(which, (0, 0))
        new = output.num_cached_tokens, sum(len(sample.token_ids) for sample in output.outputs)
        self._seen[which] = new
        served.cached_tokens += new[0] - cached
        served.completion_tokens += new[1] - generated
        if served.ttft is None:
            served.ttft = output.metrics.time_to_first_token

    def usage(self) -> Usage:
        served = self._served
        return Usage.of(served.prompt_tokens, served.completion_tokens, served.cached_tokens)


async def merge(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """(which source, item), in the order in which they come. Closing it closes every source."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue(maxsize=len(sources))

    async def pump(which: int, source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                await queue.put((which, item, None))
            await queue.put((which, None, None))
        except Exception as error:
            await queue.put((which, None, error))

    tasks = [asyncio.create_task(pump(which, source)) for which, source in enumerate(sources)]
    try:
        open_sources = len(tasks)
        while open_sources:
            which, news, error = await queue.get()
            if error is not None:
                raise error
            if news is None:
                open_sources -= 1
            else:
                yield which, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_gone(request: Request, work: Awaitable[T]) -> T | None:
    """``work``'s result, or None when the client went away first; then ``work`` is cancelled and has ended.

    The work is done in the caller's own task, and the watch begins at its first wait, while the engine computes.
    """
    mine = asyncio.current_task()
    assert mine is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        mine.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone or (sys.version_info >= (3, 11) and mine.uncancel() > 0):  # someone else ends this task
            raise
        return None
    finally:
        watcher.cancel()


async def collect(sources: Sequence[AsyncIterator[RequestOutput]], totals: Totals) -> list[RequestOutput]:
    """The last output of each source; ``totals`` sees all of them."""
    last = {}
    async for which, output in merge(sources):
        totals.see(which, output)
        last[which] = output
    return [last[which] for which in sorted(last)]


async def tokenised(serving: Serving, body: GenerationBody, prompt: str | list[int]) -> Mapping[str, Any]:
    """A prompt with its token ids: where the field is given, the last ``truncate_prompt_tokens`` of them."""
    keep = body.truncate_prompt_tokens
    if keep is not None and not 1 <= keep <= serving.llm.max_model_len:
        limit = serving.llm.max_model_len
        raise InvalidRequest(
            f"truncate_prompt_tokens: {keep} is not from 1 to {limit}, the context length",
            field="truncate_prompt_tokens",
        )
    read = await serving.llm.tokenise(prompt)
    return read if keep is None else {"prompt_token_ids": read["prompt_token_ids"][-keep:]}


def tenant_of(serving: Serving, request: Request) -> str | None:
    """The tenant whose cached prefixes this request may share; None: everybody's."""
    tenant: str | None = None if serving.config.share_prefixes else request.state.tenant
    return tenant


async def start(
    serving: Serving, request: Request, body: GenerationBody, prompts: Sequence[Any], params: Params
) -> list[AsyncIterator[RequestOutput]]:
    """One engine request per prompt. Nothing runs before its iterator is asked."""
    if serving.draining:
        raise Draining
    read = [await tokenised(serving, body, prompt) for prompt in prompts]
    request.state.served.prompt_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in read)
    tenant = tenant_of(serving, request)
    asker = Asker(tenant, body.cache_salt)
    decode = serving.llm.tokenizer.decode if serving.config.cache_map_show_text else None
    sources = [
        serving.llm.generate(
            prompt,
            params,
            new_id("req"),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            tenant=tenant,
            explain=bool(body.explain),
        )
        for prompt in read
    ]
    if not body.explain and serving.insight.record is None:
        return sources
    return [serving.insight.watch(source, request, asker, decode) for source in sources]


@dataclass
class Served:
    """What one HTTP request leaves for the access log, at ``request.state.served``; ``ttft`` in seconds."""

    request_id: str = "-"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft: float | None = None


class Draining(Exception):
    """The server is shutting down and takes nothing new."""


async def begun(
    request: Request, outputs: AsyncIterator[tuple[int, RequestOutput]]
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """``outputs`` with its first item already there, so that a refusal has a status and not just an event."""
    first = await until_gone(request, _next(outputs))

    async def rest() -> AsyncIterator[tuple[int, RequestOutput]]:
        try:
            if first is not None:
                yield first
                async for item in outputs:
                    yield item
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    return rest()


async def _next(outputs: AsyncIterator[tuple[int, RequestOutput]]) -> tuple[int, RequestOutput] | None:
    return await anext(outputs, None)


def totals_of(request: Request, name: str) -> Totals:
    """The counts of a request that answers under ``name``, which the access log shows."""
    served: Served = request.state.served
    served.request_id = name
    return Totals(served)
