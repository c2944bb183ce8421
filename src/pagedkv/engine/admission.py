"""Who may come in now: the queue, the seats, the twins and the room, asked in one place. No torch.

A sequence is let in when there is a seat (``max_num_seqs``), budget left in the step, and room for *all* its tokens
beyond what the cache holds of them, plus a margin in which the running ones can grow: one block for each, and never
less than WATERMARK of the pool. Nobody is thrown out for a newcomer.

A waiting sequence whose next uncached block is being computed (``twins.py``) waits for it if that saves at least one
block and a quarter of what it has to compute, or if it is there after this step. It holds nothing meanwhile.

Cost: nothing while no seat is free or nothing changed since the last look; else one prefix look-up for each of at
most LOOKAHEAD sequences, and one more for each that is tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pagedkv.cache.keys import KeyChain
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.match import Match
from pagedkv.cache.prefix import PrefixCache
from pagedkv.config import SchedulerConfig
from pagedkv.engine.plan import StepPlan
from pagedkv.engine.request import Sequence, Status
from pagedkv.engine.twins import Twins
from pagedkv.engine.waiting import WaitingQueue

WATERMARK = 0.01
NUM_EXPECTED = 16  # of those that wait, so many count as coming soon
LEAST_SAVING = 4  # waiting for a twin must save 1 / LEAST_SAVING of what is left to compute


class Admission:
    """Decides, and changes nothing but its own books; the scheduler acts."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, prefix: PrefixCache | None) -> None:
        self.config = config
        self.manager = manager
        self.prefix = prefix
        self.waiting = WaitingQueue(config.scheduling_policy, config.max_overtakes)
        self.twins = Twins()
        self.num_running = 0
        self.seats_held = 0
        self.num_twin_waits = 0  # times a sequence was left waiting for a twin
        self._watermark = max(1, int(manager.allocator.num_blocks * WATERMARK))
        self._seen: tuple[int, int] | None = None  # the queue and the twins when nobody could come in
        self._least_needed = 0  # blocks that the least demanding of them was waiting for

    def entered(self, seq: Sequence) -> None:
        self.num_running += 1
        self.seats_held += seq.num_seats

    def left(self, seq: Sequence) -> None:
        self.num_running -= 1
        self.seats_held -= seq.num_seats
        self.twins.drop(seq.id)

    @property
    def margin(self) -> int:
        """Blocks that stay available at an admission; none are needed while nobody runs."""
        return max(self._watermark, self.num_running) if self.num_running else 0

    def newcomers(self, plan: StepPlan) -> Iterator[Sequence]:
        """Sequences that can start now, one after the other; each must be started before the next is asked for."""
        if not self.waiting or not self._has_seat(1) or self._nothing_changed():
            return
        self._seen = None
        least_needed = self.manager.allocator.num_blocks + 1
        ordered = deque(self._in_order())
        while ordered or self.waiting.aged():
            aged = self.waiting.aged()
            seq = aged or ordered.popleft()
            if seq.status is not Status.WAITING or seq in plan.preempted:
                least_needed = 0  # it was not asked: look again in the next step
                if aged:
                    break
                continue
            if not self._has_seat(seq.num_seats) or not self._has_budget(seq, plan):
                if aged or plan.num_tokens >= self.config.max_num_batched_tokens:
                    return
                least_needed = 0  # not for want of room
                continue
            match = self._match(seq)
            if not aged and self._waits_for_twin(seq, match, plan):
                self.num_twin_waits += 1
                continue
            needed = self._blocks_needed(seq, match)
            if needed + self.margin <= self.manager.num_available:
                yield seq
                continue
            least_needed = min(least_needed, needed)
            if aged:
                break
        self._seen, self._least_needed = (self.waiting.version, self.twins.version), least_needed

    def chain(self, seq: Sequence) -> KeyChain:
        """The keys of all its full blocks; hashed once in its life."""
        if seq.chain is None:
            assert self.prefix is not None
            seq.chain = self.prefix.chain(seq.request.scope, seq.request.media)
        if seq.chain.num_tokens < seq.num_tokens:
            seq.chain.extend(seq.tokens[seq.chain.num_tokens :])
        return seq.chain

    def expected_blocks(self) -> set[int]:
        """The cached blocks that the next of the queue will attach: what a queue-aware eviction policy spares."""
        return {block for seq in self.waiting.candidates()[:NUM_EXPECTED] for block in self._match(seq).blocks}

    def _nothing_changed(self) -> bool:
        return (
            self._seen == (self.waiting.version, self.twins.version)
            and self.manager.num_available < self._least_needed + self.margin
        )

    def _has_seat(self, seats: int) -> bool:
        return self.seats_held + seats <= self.config.max_num_seqs

    def _has_budget(self, seq: Sequence, plan: StepPlan) -> bool:
        left = self.config.max_num_batched_tokens - plan.num_tokens
        if self.config.enable_chunked_prefill:
            return left > 0
        return seq.num_tokens - self._match(seq).num_cached_tokens <= left

    def _in_order(self) -> list[Sequence]:
        candidates = self.waiting.candidates()
        if self.config.scheduling_policy == "lpm" and self.prefix is not None:
            candidates.sort(key=lambda seq: -self._match(seq).num_cached_tokens)  # stable: the oldest of equals first
        return candidates

    def _match(self, seq: Sequence) -> Match:
        if self.prefix is None or not seq.request.reads_cache:
            return Match.nothing(seq.num_tokens)
        return self.prefix.match(seq.tokens, chain=self.chain(seq))

    def _blocks_needed(self, seq: Sequence, match: Match) -> int:
        """What its start takes out of ``num_available``: fresh blocks, and idle cached ones that it pins."""
        return self.manager.blocks_needed(seq.num_tokens) - match.num_blocks + match.num_idle

    def _waits_for_twin(self, seq: Sequence, match: Match, plan: StepPlan) -> bool:
        if not len(self.twins) or not seq.request.reads_cache:
            return False
        block_size = self.manager.block_size
        start = match.num_blocks
        found = self.twins.shared(self.chain(seq).keys, start, (seq.num_tokens - 1) // block_size)
        if found is None:
            return False
        leader, end = found
        saved = end * block_size - match.num_cached_tokens
        if saved * LEAST_SAVING >= seq.num_tokens - match.num_cached_tokens:
            return True
        chunk = plan.chunks.get(leader)
        return chunk is not None and chunk.end // block_size >= end
