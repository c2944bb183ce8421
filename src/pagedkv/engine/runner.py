"""Runs a StepPlan on the model: copies, forward pass, logits of the rows that are wanted.

Owns the pool's contents (who holds what is the scheduler's business) and the batch builder. It decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagedkv.attention.batch import AttentionBatch
from pagedkv.cache.manager import BlockCopy, KVCacheManager
from pagedkv.engine.batch import BatchBuilder
from pagedkv.engine.plan import Chunk, StepPlan
from pagedkv.engine.request import Sequence
from pagedkv.engine.sharing import PrefixSharing

LOGIT_ROWS = 128  # rows of a prompt whose logits exist at a time (128 x 50,000 float32 are 26 MB)


class Model(Protocol):
    """What the engine needs of a model (``model/decoder.py`` has it)."""

    @property
    def device(self) -> torch.device: ...
    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: Pool, rows: Tensor | None = None) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Pool(Protocol):
    """What the engine needs of a pool (``cache/pool.py`` has it)."""

    @property
    def k_pool(self) -> Seq[Tensor]: ...
    @property
    def v_pool(self) -> Seq[Tensor]: ...
    @property
    def k_scale(self) -> Seq[Tensor | None]: ...
    @property
    def v_scale(self) -> Seq[Tensor | None]: ...
    def copy_blocks(self, copies: Seq[BlockCopy]) -> None: ...


class StepResult:
    """What a forward pass gave. Logits are float32 [R, vocab_size], computed for the rows that are asked for.

    hidden: of the tokens that ``Wanted`` names; ends: where each chunk's last token is among them.
    """

    def __init__(self, model: Model, hidden: Tensor, ends: Seq[int]) -> None:
        self._model = model
        self._hidden = hidden
        self._ends = ends

    def last_logits(self, chunks: Seq[int]) -> Tensor:
        """Logits of the last token of the chunks with these indices in the plan: [len(chunks), vocab_size]."""
        rows = torch.tensor([int(self._ends[i]) for i in chunks], device=self._hidden.device)
        whole = len(rows) == self._hidden.shape[0]  # a step of decodes alone: every row, in order
        return self._model.logits(self._hidden if whole else self._hidden[rows])

    def each_logits(self, index: int, chunk: Chunk, count: int) -> Iterable[Tensor]:
        """Logits of the first ``count`` tokens of one chunk, LOGIT_ROWS at a time."""
        first = int(self._ends[index]) - chunk.num_tokens + 1
        for start in range(first, first + count, LOGIT_ROWS):
            yield self._model.logits(self._hidden[start : min(start + LOGIT_ROWS, first + count)])


class Wanted(NamedTuple):
    """The tokens of a step whose logits may be asked for: the model leaves out what only the others would need.

    rows: of the batch, ascending (None: all of them); ends: where the last token of each chunk is among them. A chunk
    that stops short of its sequence's end gives no token; if the log-probabilities of its prompt are wanted, all of it.
    """

    rows: list[int] | None
    ends: list[int]

    @classmethod
    def of(cls, plan: StepPlan, ends: list[int]) -> Wanted:
        """ends: the row of each chunk's last token in the batch."""
        rows: list[int] = []
        places: list[int] = []
        for chunk, end in zip(plan.chunks.values(), ends, strict=True):
            if chunk.seq.request.prompt_logprobs is not None:
                rows += range(end - chunk.num_tokens + 1, end + 1)
            elif chunk.end == chunk.seq.num_tokens:
                rows.append(end)
            places.append(len(rows) - 1)
        return cls(None, ends) if len(rows) == plan.num_tokens else cls(rows, places)


class ModelRunner:
    """Model and pool. ``build_seconds`` and ``forward_seconds`` add up what the steps took."""

    def __init__(
        self,
        model: Model,
        pool: Pool,
        manager: KVCacheManager,
        max_num_seqs: int,
        sharing: PrefixSharing | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.pool = pool
        self.builder = BatchBuilder(manager, max_num_seqs, model.device)
        self.build_seconds = 0.0
        self.forward_seconds = 0.0
        self._sharing = sharing
        self._clock = clock

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that run no more."""
        self.builder.release(sequences)

    def run(self, plan: StepPlan) -> StepResult:
        """Copies first, then one forward pass over all chunks."""
        begin = self._clock()
        copies = plan.all_copies
        if copies:
            self.pool.copy_blocks(copies)
        batch = self.builder.build(plan)
        if self._sharing is not None:
            self._sharing.add(plan, batch.attention)
        built = self._clock()
        wanted = Wanted.of(plan, batch.ends.tolist())
        rows = None if wanted.rows is None else torch.tensor(wanted.rows, dtype=torch.int64, device=self.model.device)
        hidden = self.model.forward(batch.token_ids, batch.attention, self.pool, rows)
        self.build_seconds += built - begin
        self.forward_seconds += self._clock() - built
        return StepResult(self.model, hidden, wanted.ends)
