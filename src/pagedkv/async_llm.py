"""AsyncLLM: the door for servers. An async iterator for each request, the engine in a thread of its own.

    llm = AsyncLLM("smollm2-135m")
    async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)

A consumer that goes away (the iterator is closed, its task is cancelled) ends its request within a step. A queue that
is full is QueueFull at once. When the engine's thread dies, every consumer gets EngineDead and ``is_alive`` is False.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from pagedkv.config import EngineConfig, EngineOptions
from pagedkv.engine.build import Built, build_engine
from pagedkv.engine.engine import Engine
from pagedkv.engine.intake import Params, Prompt, read_prompt
from pagedkv.engine.loop import EngineThread, Observer, Stream
from pagedkv.engine.metrics import EngineStats
from pagedkv.engine.outputs import RequestOutput
from pagedkv.errors import InvalidRequest, QueueFull, RequestFailed
from pagedkv.llm import Door, Message, chat_prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
DEFAULT_QUEUE = 1024  # requests that may wait
LONG_TEXT = 8192  # characters; a longer prompt is tokenised beside the event loop, not in it


class AsyncLLM(Door):
    """As ``LLM``, for many callers at once. ``max_num_queued_reqs`` is DEFAULT_QUEUE unless given."""

    def __init__(
        self, model: str, *, progress: Callable[[int, int], None] | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        options.setdefault("max_num_queued_reqs", DEFAULT_QUEUE)
        self._start(build_engine(EngineConfig.from_kwargs(model=model, **options), progress=progress))

    def _start(self, built: Built) -> None:
        super()._start(built)
        self._thread = EngineThread(built.engine)

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive

    @property
    def bytes_per_block(self) -> int:
        """What one block of the pool takes, all layers, scales included."""
        return self._built.pool.bytes_per_block

    async def tokenise(self, prompt: Prompt) -> Mapping[str, Any]:
        """``prompt`` with its token ids, for ``generate``: text becomes ids here, not between two steps of the engine.

        Raises InvalidRequest, and QueueFull where a request would be refused: then no work is spent on its prompt.
        """
        self._check_queue()
        if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None:
            return prompt
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            text, ids = await asyncio.to_thread(read_prompt, prompt, self.tokenizer)
        else:
            text, ids = read_prompt(prompt, self.tokenizer)
        return {"prompt": text, "prompt_token_ids": ids}

    async def generate(
        self,
        prompt: Prompt,
        params: Params,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        explain: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Everything so far, whenever there is more of it; the last item has ``finished``.

        request_id: the caller's name for it (a new one, if left out); two requests may have the same
        cache_salt: requests share cached prefixes only with the same salt
        explain:    keep why the prefix cache had no more of the prompt (``RequestOutput.report``)
        tenant:     as a salt, but the server's to set: a client's salt never leads into another tenant's blocks

        Raises InvalidRequest, QueueFull or EngineDead before the first item, RequestFailed where this request alone
        came to grief, EngineDead when the engine dies.
        """
        stream = Stream()
        tokenised = await self.tokenise(prompt)
        salt = joint_salt(cache_salt, tenant)
        name = uuid4().hex if request_id is None else request_id

        def add(engine: Engine) -> int:
            return engine.add_request(name, tokenised, params, priority=priority, cache_salt=salt, explain=explain)

        ended = False
        try:
            self._thread.enter(stream, add)
            while not ended:
                output = await stream.next()
                ended = output.finished
                if output.error is not None:
                    raise RequestFailed(output.error)
                yield output
        finally:
            if not ended:  # also when it was cancelled before it entered: this call comes after that one
                stream.closed = True
                self._thread.call(lambda engine: self._leave(engine, stream))

    def chat_prompt(
        self, messages: Sequence[Message], *, cache_salt: str | None = None, tenant: str | None = None, **template: Any
    ) -> list[int]:
        """The token ids of a conversation, as ``LLM.chat_prompt``; salt and tenant as for ``generate``."""
        return chat_prompt(self._built.engine, self.tokenizer, messages, joint_salt(cache_salt, tenant), template)

    async def chat(
        self,
        messages: Sequence[Message],
        params: Params,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        """``generate`` for a conversation."""
        ids = self.chat_prompt(messages, cache_salt=cache_salt, tenant=tenant, **template)
        outputs = self.generate(ids, params, request_id, priority=priority, cache_salt=cache_salt, tenant=tenant)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def abort(self, request_id: str) -> None:
        """Ends all requests of that name; their iterators end with finish_reason "abort". Unknown: nothing happens."""
        self._thread.call(lambda engine: self._abort(engine, request_id))

    def abort_all(self) -> None:
        """Ends every request; their iterators end with finish_reason "abort"."""
        self._thread.call(self._abort_everything)

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._thread.stats

    def observe(self, observer: Observer) -> None:
        """``observer`` hears of every step and every output from now on, in the engine's thread."""
        self._thread.observer = observer

    async def inspect(self, look: Callable[[Engine], T]) -> T:
        """``look(engine)`` between two steps, in the engine's thread; it must change nothing and be quick."""
        return await asyncio.wrap_future(self._thread.call(look))

    async def reset_prefix_cache(self) -> tuple[bool, int]:
        """Forgets every cached prefix. (whether all blocks are free now, how many are still in use)"""
        return await asyncio.wrap_future(self._thread.call(lambda engine: engine.reset_prefix_cache()))

    def shutdown(self) -> None:
        """Ends the engine's thread; requests that run get EngineDead. Harmless if called twice."""
        self._thread.stop()

    def _check_queue(self) -> None:
        limit = self._built.config.scheduler.max_num_queued_reqs
        if limit is not None and self._thread.num_calls + self._thread.stats.num_waiting >= limit:
            raise QueueFull(limit)

    def _abort(self, engine: Engine, request_id: str) -> None:
        for key in engine.keys_of(request_id):
            self._abort_key(engine, key)

    def _abort_everything(self, engine: Engine) -> None:
        for key in engine.all_keys:
            self._abort_key(engine, key)

    def _leave(self, engine: Engine, stream: Stream) -> None:
        if stream.key is not None:
            self._abort_key(engine, stream.key)

    def _abort_key(self, engine: Engine, key: int) -> None:
        outputs = engine.abort_key(key)
        self._thread.deliver(outputs, [key] * len(outputs))


def joint_salt(cache_salt: str | None, tenant: str | None) -> str | None:
    """One salt of two parts that cannot run into each other; a salt without a tenant is no tenant's."""
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise InvalidRequest("cache_salt must be a text that is not empty", field="cache_salt")
    if tenant is None:
        return None if cache_salt is None else f"-:{cache_salt}"
    return f"{len(tenant)}:{tenant}:{cache_salt or ''}"
