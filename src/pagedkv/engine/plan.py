"""StepPlan: what one step runs. Plain data between the scheduler, the batch builder and the engine."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedkv.cache.manager import BlockCopy
from pagedkv.engine.request import Sequence


class Chunk(NamedTuple):
    """``num_tokens`` of ``seq`` from position ``start``. One that reaches its last token also gives the next one."""

    seq: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass
class StepPlan:
    """One step.

    chunks:      by sequence id, in the order of the batch
    copies:      by sequence id, in the order in which they were planned; they run before anything is written
    num_tokens:  of all chunks, at most the budget
    admitted, preempted: what planning did on the way
    dry:         sequences that nothing can make room for (alone in the pool): they end with "length"
    """

    chunks: dict[Hashable, Chunk] = field(default_factory=dict)
    copies: dict[Hashable, list[BlockCopy]] = field(default_factory=dict)
    num_tokens: int = 0
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    dry: list[Sequence] = field(default_factory=list)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """``seq`` runs ``num_tokens`` tokens; a second call for it replaces the first."""
        before = self.chunks.get(seq.id)
        self.chunks[seq.id] = Chunk(seq, seq.num_computed_tokens, num_tokens)
        self.num_tokens += num_tokens - (before.num_tokens if before else 0)

    def drop(self, seq: Sequence) -> None:
        """``seq`` does not run after all, and what was to be copied for it is not."""
        chunk = self.chunks.pop(seq.id, None)
        self.copies.pop(seq.id, None)
        if chunk is not None:
            self.num_tokens -= chunk.num_tokens

    @property
    def all_copies(self) -> list[BlockCopy]:
        return [copy for copies in self.copies.values() for copy in copies]
