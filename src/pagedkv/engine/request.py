"""Request and Sequence: what was asked, and the streams of tokens that answer it. No torch.

A Request owns one Sequence until its prompt is computed, then ``n`` (the others are forks). A Sequence is what the
scheduler moves; where it is, its status says:

    WAITING    in the queue; holds no blocks. New, or preempted: then it computes prompt and output again
    RUNNING    in the scheduler's running list; holds a table of blocks
    FINISHED   in neither; holds nothing

One number of progress: ``num_computed_tokens`` chases ``num_tokens``. A chunk of prefill, a prefix hit, the way back
after preemption and a decode are all the same case, and ``0 <= num_computed_tokens <= num_tokens`` at every moment.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedkv.engine.outputs import CompletionOutput, FinishReason, RequestMetrics, TokenLogprobs
from pagedkv.engine.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from pagedkv.cache.keys import KeyChain, KeyScope, MediaSpan
    from pagedkv.cache.report import AttachReport
    from pagedkv.engine.beam import BeamSearch
    from pagedkv.engine.sampler import SampleRow
    from pagedkv.engine.stop import Voice


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One question.

    key:             the engine's own number, rising with arrival; the only identity that the engine trusts
    request_id:      what the client calls it; two clients may use the same
    max_new_tokens:  what ``max_tokens``, the context length and the prompt leave
    salt, scope:     what its cache keys are valid under (None: the engine's own);  media: images and the like by digest
    final_only:      its output is reported once, at the end
    explain, report: whether to keep what its first admission found in the cache, and that
    prompt_logprobs: filled chunk by chunk; the first entry is None. None unless asked for
    num_cached_tokens: tokens of the prompt that its first admission found in the cache
    beam, best:      the search over its sequences, if it is one, and what it found
    error:           why it failed; None otherwise
    """

    key: int
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams | BeamSearchParams
    max_new_tokens: int
    priority: int = 0
    salt: str | None = None
    scope: KeyScope | None = None
    media: Seq[MediaSpan] = ()
    final_only: bool = False
    explain: bool = False
    report: AttachReport | None = None
    beam: BeamSearch | None = None
    best: list[CompletionOutput] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_forks: int = 0
    error: str | None = None

    @property
    def num_samples(self) -> int:
        """Sequences that it becomes once its prompt is computed."""
        return self.params.beam_width if isinstance(self.params, BeamSearchParams) else self.params.n

    @property
    def reads_cache(self) -> bool:
        """Whoever asks for the prompt's log-probabilities computes the prompt in spite of the cache."""
        return self.prompt_logprobs is None

    @property
    def finished(self) -> bool:
        return all(seq.status is Status.FINISHED for seq in self.sequences)

    def fork(self, parent: Sequence) -> Sequence:
        """A new sequence with the tokens of ``parent``. It is the caller's to add to ``sequences``."""
        self.num_forks += 1
        return Sequence(self, self.num_forks, parent.tokens.copy(), parent.num_prompt_tokens)


@dataclass(eq=False)
class Sequence:
    """One stream of tokens: the prompt, then what was generated.

    index:               unique within its request; the root has 0
    age:                 (arrival of its request, index): sequences are served in this order and, from the other end,
                         preempted; also the name by which the cache knows it
    tokens:              prompt and output in one list
    num_computed_tokens: tokens whose KV is in the pool and counts
    num_writable:        positions below this lie in blocks that nobody else can write to
    num_lost_tokens:     what preemption threw away the last time
    num_seats:           running sequences that it will be once its prompt is computed (a root of n samples: n)
    admitted:            it ran before; another admission is a return
    table_row, table_changed: its row in the batch builder, and whether the block table is newer than that
    row, voice:          the sampler's and the detokeniser's state of it
    candidates:          a beam's likeliest next tokens, while it waits for the other beams
    """

    request: Request
    index: int
    tokens: list[int]
    num_prompt_tokens: int
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_writable: int = 0
    num_lost_tokens: int = 0
    num_seats: int = 1
    admitted: bool = False
    table_row: int = -1
    table_changed: bool = True
    chain: KeyChain | None = None
    row: SampleRow | None = None
    voice: Voice | None = None
    candidates: list[tuple[int, float]] | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    age: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.age = (self.request.key, self.index)

    @property
    def id(self) -> Hashable:
        """The cache's name for it."""
        return self.age

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def in_prefill(self) -> bool:
        """More than the last token is missing, or nothing was generated yet."""
        missing = len(self.tokens) - self.num_computed_tokens
        return missing > 1 or (missing == 1 and len(self.tokens) == self.num_prompt_tokens)

    def computed(self, num_tokens: int) -> None:
        """KV of ``num_tokens`` more tokens was written."""
        self.num_computed_tokens += num_tokens
        assert 0 < self.num_computed_tokens <= len(self.tokens), (self.num_computed_tokens, len(self.tokens))

    def forget(self) -> None:
        """Its blocks were taken: everything is to be computed again."""
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0
        self.num_writable = 0
        self.table_changed = True
