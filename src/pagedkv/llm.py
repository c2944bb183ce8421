"""LLM: the offline front door. A list of prompts in, a list of outputs out, in the same order.

    llm = LLM("smollm2-135m")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
        print(output.outputs[0].text)

Prompts of one call run together: what they share is computed once and the rest in batches. One call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from pagedkv.config import EngineConfig, EngineOptions
from pagedkv.engine.build import Built, build_engine
from pagedkv.engine.engine import Engine
from pagedkv.engine.intake import Params, Prompt
from pagedkv.engine.metrics import EngineStats
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.params import BeamSearchParams, SamplingParams
from pagedkv.errors import InvalidRequest
from pagedkv.model.config import ModelConfig
from pagedkv.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Message = Mapping[str, Any]


class Door:
    """What ``LLM`` and ``AsyncLLM`` share: the engine behind them, and what there is to know about it."""

    _built: Built

    @classmethod
    def from_built(cls, built: Built) -> Self:
        """Around an engine that was put together elsewhere. Nobody else may touch that engine from now on."""
        door = cls.__new__(cls)
        door._start(built)
        return door

    def _start(self, built: Built) -> None:
        self._built = built

    @property
    def banner(self) -> list[str]:
        """What was loaded and how it is set up, one fact a line."""
        return self._built.banner

    @property
    def config(self) -> EngineConfig:
        return self._built.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._built.loaded.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self._built.loaded.config

    @property
    def model_name(self) -> str:
        return self._built.config.model

    @property
    def max_model_len(self) -> int:
        return self._built.plan.max_model_len


class LLM(Door):
    """A model, its pool and its engine in this process.

    model:    a local directory or .gguf file, "smollm2-135m", or a Hugging Face id
    options:  ``config.EngineOptions``; an unknown keyword is a TypeError, a value that cannot work an InvalidRequest
    progress: called with (done, total) bytes while the weights are read
    """

    def __init__(
        self, model: str, *, progress: Callable[[int, int], None] | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        self._start(build_engine(EngineConfig.from_kwargs(model=model, **options), progress=progress))

    @property
    def engine(self) -> Engine:
        return self._built.engine

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        explain: bool = False,
    ) -> list[RequestOutput]:
        """The outputs of all prompts, ``result[i]`` of ``prompts[i]``.

        prompts: a string, a list of token ids, ``{"prompt_token_ids": [...]}``, or a list of these
        sampling_params: one for all, or one for each prompt
        use_tqdm: a progress bar on stderr, if that is a terminal
        explain: keep why the prefix cache had no more of each prompt, for ``output.explain()``

        A prompt or parameter that cannot be served raises InvalidRequest that says which one, before anything runs. A
        failure of one request while it runs is its output's ``error``; the others are not touched.
        """
        return self._run(prompts, sampling_params or SamplingParams(), use_tqdm, priority, cache_salt, explain)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
        explain: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """As ``generate``, for one conversation or a list of them.

        template: as in ``chat_prompt``
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        chats = [messages] if single else messages
        prompts: list[Prompt] = [
            {"prompt_token_ids": self.chat_prompt(cast("Sequence[Message]", chat), cache_salt=cache_salt, **template)}
            for chat in chats
        ]
        return self._run(prompts, sampling_params or SamplingParams(), use_tqdm, None, cache_salt, explain)

    def chat_prompt(self, messages: Sequence[Message], *, cache_salt: str | None = None, **template: Any) -> list[int]:
        """The token ids of a conversation, ids that this engine generated among them (``engine/turns.py``).

        template: tools, add_generation_prompt, continue_final_message, chat_template, and what the template itself
        takes. Raises ChatTemplateError.
        """
        return chat_prompt(self.engine, self.tokenizer, messages, cache_salt, template)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """The ``beam_width`` best sequences of each prompt, best first."""
        return self._run(prompts, params, use_tqdm, None, None)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params], *, cache_salt: str | None = None
    ) -> Iterator[RequestOutput]:
        """Outputs as they grow; ``request_id`` is the index of the prompt. Closing the iterator aborts what runs."""
        keys = self._add_all(prompts, params, None, cache_salt, final_only=False)
        return self._steps(keys)

    def stats(self) -> EngineStats:
        """What the engine did so far."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> tuple[bool, int]:
        """Forgets every cached prefix. (whether all blocks are free now, how many are still in use)"""
        return self.engine.reset_prefix_cache()

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params],
        use_tqdm: bool,
        priority: Sequence[int] | None,
        cache_salt: str | None,
        explain: bool = False,
    ) -> list[RequestOutput]:
        keys = self._add_all(prompts, params, priority, cache_salt, final_only=True, explain=explain)
        done: dict[str, RequestOutput] = {}
        with _bar(self.engine, len(keys)) if use_tqdm and keys else nullcontext() as bar:
            for output in self._steps(keys):
                done[output.request_id] = output
                if bar is not None:
                    bar.finished(output)
        return [done[str(index)] for index in range(len(keys))]

    def _add_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params],
        priority: Sequence[int] | None,
        cache_salt: str | None,
        *,
        final_only: bool,
        explain: bool = False,
    ) -> list[int]:
        """All requests or none."""
        listed = _as_list(prompts)
        each = _one_for_each(params, len(listed), "sampling_params")
        ranks = _one_for_each(0 if priority is None else priority, len(listed), "priority")
        keys: list[int] = []
        try:
            for index, (prompt, param, rank) in enumerate(zip(listed, each, ranks, strict=True)):
                keys.append(
                    self.engine.add_request(
                        str(index),
                        prompt,
                        param,
                        priority=rank,
                        cache_salt=cache_salt,
                        final_only=final_only,
                        explain=explain,
                    )
                )
        except Exception as error:
            self._abort(keys)
            if isinstance(error, InvalidRequest) and len(listed) > 1:
                raise type(error)(f"prompt {len(keys)} of {len(listed)}: {error}", field=error.field) from None
            raise
        return keys

    def _steps(self, keys: list[int]) -> Iterator[RequestOutput]:
        """Steps until these requests have ended; whatever ends this early aborts them."""
        try:
            while self.engine.has_unfinished():
                yield from self.engine.step()
        finally:
            self._abort(keys)

    def _abort(self, keys: list[int]) -> None:
        for key in keys:
            self.engine.abort_key(key)


def chat_prompt(
    engine: Engine,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    cache_salt: str | None,
    template: Mapping[str, Any],
) -> list[int]:
    """The ids of a rendered conversation; where the engine remembers a part of it, its own ids of that part."""
    text = tokenizer.render_chat(messages, **template)
    if engine.turns is None:
        return tokenizer.encode(text, add_special_tokens=False)
    return engine.turns.encode(text, salt=cache_salt or "")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list whose first item is a number is one prompt of ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        return [cast("Prompt", prompts)]
    if prompts and not isinstance(prompts[0], (str, Mapping, Sequence)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _one_for_each(values: Any, count: int, name: str) -> list[Any]:
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise InvalidRequest(f"{name}: {len(values)} given for {count} prompts", field=name)
    return list(values)


class _Bar(AbstractContextManager["_Bar"]):
    """Requests done, tokens a second, and the share of prompt tokens that came from the cache."""

    def __init__(self, engine: Engine, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        console = Console(stderr=True)
        self._engine = engine
        self._first = engine.stats()
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=total, rate="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def finished(self, _: RequestOutput) -> None:
        """One more request has ended."""
        now, first = self._engine.stats(), self._first
        seconds = max(self._progress.tasks[0].elapsed or 0.0, 1e-9)
        queries = now.prefix_queries - first.prefix_queries
        hits = now.prefix_hits - first.prefix_hits
        rate = f"{(now.generated_tokens - first.generated_tokens) / seconds:.1f} tokens/s"
        if queries:
            rate += f", {hits / queries:.0%} of prompt tokens from the cache"
        self._progress.update(self._task, advance=1, rate=rate)


def _bar(engine: Engine, total: int) -> _Bar:
    return _Bar(engine, total)
