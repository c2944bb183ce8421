"""What comes in: a prompt in any of its forms and its parameters, turned into a Request or refused.

Everything that can be known to be impossible is refused here, before the request enters any queue, with the field,
the value and the limit in the message; nothing has changed then.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from pagedkv.cache.keys import KeyScope, MediaSpan
from pagedkv.engine.beam import BeamSearch
from pagedkv.engine.params import BeamSearchParams, SamplingParams, check, check_ids
from pagedkv.engine.request import Request, Sequence
from pagedkv.engine.sampler import SampleRow, encode_bad_words, request_seed
from pagedkv.engine.stop import Voice
from pagedkv.engine.structured import Grammar, GrammarCompiler
from pagedkv.errors import InvalidRequest, RequestTooLong
from pagedkv.model.tokenizer import Tokenizer

Prompt = str | Seq[int] | Mapping[str, Any]
Params = SamplingParams | BeamSearchParams

MAX_REQUEST_ID = 1024  # characters
MAX_PRIORITY = 2**31


@dataclass(frozen=True)
class Asked:
    """What a request brings beside prompt and parameters; see ``Engine.add_request``."""

    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    media: Seq[MediaSpan] = ()
    final_only: bool = False
    explain: bool = False


@dataclass(frozen=True)
class Limits:
    """What this engine can serve.

    vocab_size: columns of the logits;  max_model_len: tokens of a sequence, output included
    max_pool_tokens: tokens that the whole pool holds
    """

    vocab_size: int
    max_model_len: int
    max_pool_tokens: int

    def check_length(self, num_prompt_tokens: int, params: Params) -> int:
        """How many tokens may be generated after a prompt of this length; RequestTooLong if it cannot be served."""
        if num_prompt_tokens > self.max_pool_tokens:
            raise RequestTooLong(
                f"the prompt has {num_prompt_tokens} tokens and the whole KV pool holds {self.max_pool_tokens}",
                field="prompt",
            )
        scoring = params.max_tokens == 0
        room = self.max_model_len - num_prompt_tokens
        if room < (0 if scoring else 1):
            least = "" if scoring else ", of which at least 1 is for the output"
            raise RequestTooLong(
                f"the prompt has {num_prompt_tokens} tokens; max_model_len is {self.max_model_len} tokens{least}",
                field="prompt",
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """(text, ids) of a prompt: a string, a list of ids, or {"prompt": ...} / {"prompt_token_ids": [...]}."""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise InvalidRequest(
                f"prompt: a mapping holds 'prompt' or 'prompt_token_ids', not {sorted(map(str, unknown))}",
                field="prompt",
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is None:
            return read_prompt(text if isinstance(text, str) else _no_prompt(text), tokenizer)
        return (text if isinstance(text, str) else None), _ids(ids)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("prompt: this engine has no tokenizer; give token ids", field="prompt")
        ids = tokenizer.encode(prompt)
        if not ids:
            raise InvalidRequest("prompt: an empty prompt has no token to start from", field="prompt")
        return prompt, ids
    return None, _ids(prompt)


def _ids(values: Any) -> list[int]:
    if isinstance(values, (bytes, bytearray)) or (not isinstance(values, Seq) and not hasattr(values, "tolist")):
        _no_prompt(values)
    try:
        ids = [operator.index(value) for value in values if not isinstance(value, bool) or _no_prompt(value)]
    except TypeError:
        raise InvalidRequest("prompt: token ids must be whole numbers", field="prompt") from None
    if not ids:
        raise InvalidRequest("prompt: an empty prompt has no token to start from", field="prompt")
    return ids


def _no_prompt(value: object) -> Any:
    raise InvalidRequest(f"prompt must be a text or a list of token ids, not {type(value).__name__}", field="prompt")


class Intake:
    """Makes requests. ``scope`` is the engine's own (None: no prefix cache); ``seed`` serves requests without one."""

    def __init__(
        self,
        limits: Limits,
        tokenizer: Tokenizer | None,
        *,
        scope: KeyScope | None = None,
        eos_ids: Seq[int] = (),
        seed: int = 0,
        max_num_seqs: int = 1,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.num_decodable = None if tokenizer is None else tokenizer.vocab_size
        self._scope = scope
        self._seed = seed
        self._max_num_seqs = max_num_seqs
        self._grammars = None if tokenizer is None else GrammarCompiler(tokenizer, limits.vocab_size, self.eos_ids)

    def make(self, key: int, request_id: str, prompt: Prompt, params: Params, asked: Asked) -> Request:
        """A request with its root sequence, or InvalidRequest."""
        _check_identity(request_id, asked.priority)
        self._check_params(params)
        text, ids = read_prompt(prompt, self.tokenizer)
        check_ids(ids, self.limits.vocab_size, field="prompt")
        max_new_tokens = self.limits.check_length(len(ids), params)
        _check_media(asked.media, len(ids))
        request = Request(
            key=key,
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            max_new_tokens=max_new_tokens,
            priority=asked.priority,
            salt=asked.cache_salt,
            scope=self._scope_of(asked),
            media=tuple(asked.media),
            final_only=asked.final_only,
            explain=asked.explain,
        )
        root = Sequence(request, 0, ids.copy(), len(ids))
        root.num_seats = min(request.num_samples, self._max_num_seqs)
        request.sequences.append(root)
        self._prepare(request, root)
        return request

    def _check_params(self, params: Params) -> None:
        if isinstance(params, SamplingParams):
            check(params, vocab_size=self.limits.vocab_size, num_decodable=self.num_decodable)
        elif not isinstance(params, BeamSearchParams):
            raise InvalidRequest(
                f"params must be SamplingParams or BeamSearchParams, not {type(params).__name__}", field="params"
            )

    def _prepare(self, request: Request, root: Sequence) -> None:
        """What the sampler, the detokeniser or the beam search need to know of it."""
        params = request.params
        if isinstance(params, BeamSearchParams):
            request.beam = BeamSearch(params, self.eos_ids, request.max_new_tokens)
            return
        root.row = SampleRow(
            params,
            root.tokens,
            root.num_prompt_tokens,
            seed=request_seed(params, self._seed, request.key),
            eos_ids=self.eos_ids,
            bad_words=encode_bad_words(params, self.tokenizer) if self.tokenizer is not None else (),
            grammar=self._grammar(params),
        )
        root.voice = self.voice(request)
        root.logprobs = None if params.logprobs is None else []
        request.prompt_logprobs = None if params.prompt_logprobs is None else [None]

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("structured_outputs: this engine has no tokenizer", field="structured_outputs")
        return self._grammars.start(params.structured_outputs)

    def voice(self, request: Request) -> Voice:
        """A fresh detokeniser for one sequence of the request."""
        assert isinstance(request.params, SamplingParams)
        return Voice(self.tokenizer, request.params, eos_ids=self.eos_ids)

    def _scope_of(self, asked: Asked) -> KeyScope | None:
        for name in ("cache_salt", "adapter"):
            value = getattr(asked, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidRequest(f"{name} must be a text that is not empty", field=name)
        if self._scope is None or (asked.cache_salt is None and asked.adapter is None):
            return None
        return replace(
            self._scope, salt=asked.cache_salt or self._scope.salt, adapter=asked.adapter or self._scope.adapter
        )


def _check_identity(request_id: object, priority: object) -> None:
    if not isinstance(request_id, str) or not request_id or len(request_id) > MAX_REQUEST_ID:
        shown = f"{len(request_id)} characters" if isinstance(request_id, str) else type(request_id).__name__
        raise InvalidRequest(
            f"request_id must be a text of 1 to {MAX_REQUEST_ID} characters, not {shown}", field="request_id"
        )
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {priority!r}",
            field="priority",
        )


def _check_media(media: Seq[MediaSpan], num_prompt_tokens: int) -> None:
    for span in media:
        if span.offset + span.length > num_prompt_tokens:
            raise InvalidRequest(
                f"media: a span ends at {span.offset + span.length}; the prompt has {num_prompt_tokens} tokens",
                field="media",
            )
