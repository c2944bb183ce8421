"""What a request gives back. Plain data, with vLLM's names; no tensors, no references into the engine.

A ``RequestOutput`` holds everything so far, not the news since the last one: the text of a later output begins
with the text of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from pagedkv.cache.report import AttachReport

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """The model's own log-probability of a token, before temperature, penalties and filters.

    logprob:       natural logarithm, -inf where the model gives it no probability
    rank:          1 for the most likely token; tokens of equal logit share a rank
    decoded_token: the token's own text, with U+FFFD where it holds a part of a character only
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]  # the token that came first, then the most likely ones, best first


@dataclass(frozen=True)
class CompletionOutput:
    """One sample.

    index:         0 .. n-1
    text:          final text: nothing in it is taken back later
    token_ids:     every id that was generated, also the EOS or stop id that ended it, whose text is not in ``text``
    cumulative_logprob: sum of the tokens' log-probabilities; None unless logprobs were asked for (or a beam)
    logprobs:      one entry a token, or None
    finish_reason: None while it runs
    stop_reason:   the stop string or stop id that ended it; None for EOS and other reasons
    score:         beam search only: what the beams are ordered by
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Moments of a request's life, in seconds of one monotonic clock; None: not reached yet.

    arrival:         it entered the queue
    first_scheduled: a step took it for the first time
    first_token, last_token, finished: as they say
    num_preemptions: how often its blocks were taken away;  num_recomputed_tokens: tokens computed again because of it
    """

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        return _between(self.arrival, self.first_scheduled)

    @property
    def time_to_first_token(self) -> float | None:
        return _between(self.arrival, self.first_token)

    @property
    def prefill_time(self) -> float | None:
        return _between(self.first_scheduled, self.first_token)

    @property
    def decode_time(self) -> float | None:
        return _between(self.first_token, self.last_token)

    @property
    def e2e_latency(self) -> float | None:
        return _between(self.arrival, self.finished)


@dataclass(frozen=True)
class RequestOutput:
    """Everything a request has produced so far.

    prompt:            the text, None where the prompt came as ids
    prompt_logprobs:   one entry a prompt token, the first None (nothing came before it); None unless asked for
    outputs:           n samples in order of index; beams in order of score
    num_cached_tokens: prompt tokens whose KV came from the prefix cache
    report:            why it was not more; None unless ``explain`` was asked for (and the prefix cache is on)
    error:             what ended it, where that was a failure of this request alone; its finish_reason is "abort" then
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    report: AttachReport | None = None

    def explain(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """The report in words. ``decode``: ids to text, where the texts around a divergence may be shown."""
        from pagedkv.insight.explain import describe

        if self.report is None:
            return "Not kept: ask for it with explain=True, and with the prefix cache on."
        return describe(self.report, decode=decode, prompt=self.prompt_token_ids)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
