"""What runs in the next step: state in, StepPlan out. No torch; ints, lists and the cache's accounts.

    schedule() -> StepPlan        running sequences first (decodes, then prefill chunks), then admissions
    commit(plan)                  after the forward pass: lengths move, full blocks are published
    fork / remove                 what the engine decides about single sequences

One budget of tokens a step. All capacity questions are answered while planning, in this order: free blocks, then
eviction from the prefix cache, then preemption of the newest sequence (the least urgent first under ``priority``).
The accounts change while planning and the pool's contents do not: copies are part of the plan and run before any
write of it; a preempted sequence takes its copies out of the plan with it.

A sequence comes in with room for all its tokens, so a long prompt that was begun is never thrown out for the rest of
itself. The oldest sequence is never preempted for a younger one, so something always ends, and with the age bound of
``waiting.py`` everything does.

Cost of a step: O(running sequences + blocks that change hands), plus what ``admission.py`` says about the queue.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Hashable
from dataclasses import dataclass

from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.policies import QueueAware
from pagedkv.cache.prefix import PrefixCache
from pagedkv.config import SchedulerConfig
from pagedkv.engine.admission import Admission
from pagedkv.engine.plan import StepPlan
from pagedkv.engine.request import Sequence, Status
from pagedkv.engine.waiting import WaitingQueue


@dataclass
class SchedulerCounts:
    """Totals since the start, in tokens where nothing else is said.

    prefix_queries, prefix_hits: prompt tokens of requests that may read the cache, at their first admission
    num_recomputed_tokens:       computed a second time after a preemption (also part of prefill_tokens)
    allocated_blocks:            fresh blocks handed out;  copied_blocks: those of them that copy-on-write took
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    allocated_blocks: int = 0
    copied_blocks: int = 0


class Scheduler:
    """Owns who waits and who runs; the only caller of the cache's accounts in the engine."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, prefix: PrefixCache | None) -> None:
        self.config = config
        self.manager = manager
        self.prefix = prefix
        self.admission = Admission(config, manager, prefix)
        if prefix is not None and isinstance(prefix.policy, QueueAware):
            prefix.policy.queue = self.admission.expected_blocks
        self.running: list[Sequence] = []  # by age
        self.counts = SchedulerCounts()

    @property
    def waiting(self) -> WaitingQueue:
        return self.admission.waiting

    def fits_pool(self, num_tokens: int) -> bool:
        """Whether ``num_tokens`` tokens have room in an empty pool."""
        return self.manager.blocks_needed(num_tokens) <= self.manager.allocator.num_blocks

    # ---- planning ----

    def schedule(self) -> StepPlan:
        """The next step. Never raises for want of room: who cannot run waits, is preempted, or is named in ``dry``."""
        plan = StepPlan()
        self._plan_decodes(plan)
        self._plan_prefills(plan, shared=True)
        for seq in self.admission.newcomers(plan):
            self._start(seq, plan)
        self._plan_prefills(plan, shared=False)  # what nobody else wanted
        if not plan.chunks and not plan.dry and self.waiting:
            self._unblock(plan)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> None:
        for seq in [seq for seq in self.running if not seq.in_prefill]:
            if seq.status is not Status.RUNNING or seq.num_computed_tokens == seq.num_tokens:
                continue  # preempted a moment ago for an older one, or a beam that waits for the others
            if seq.num_computed_tokens < seq.num_writable or self._make_room(seq, plan):
                plan.add(seq, 1)

    def _plan_prefills(self, plan: StepPlan, *, shared: bool) -> None:
        """Chunks of prompts under way, oldest first; their room is reserved already.

        shared: while others want the budget too, a prompt leaves them half of what is there, so that a short one can
                pass a long one. Without it the oldest takes what it can: what nobody else wanted.
        """
        prefills = [seq for seq in self.running if seq.in_prefill]
        for place, seq in enumerate(prefills):
            room = self.config.max_num_batched_tokens - plan.num_tokens
            if room <= 0:
                return
            chunk = plan.chunks.get(seq.id)
            planned = chunk.num_tokens if chunk is not None else 0
            missing = seq.num_tokens - seq.num_computed_tokens - planned
            if self.config.enable_chunked_prefill:
                contested = shared and (self.waiting or place + 1 < len(prefills))
                missing = min(missing, (room + 1) // 2 if contested else room)
            if 0 < missing <= room:
                plan.add(seq, planned + missing)

    def _make_room(self, seq: Sequence, plan: StepPlan) -> bool:
        """One more position for a running sequence: evict, then preempt the newest. False: ``seq`` itself had to go."""
        while self.manager.blocks_to_reserve(seq.id, 1) > self.manager.num_available:
            victim = max(self.running, key=self._expendable)
            if victim is seq and len(self.running) == 1:
                plan.dry.append(seq)
                return False
            self._preempt(victim, plan)
            if victim is seq:
                return False
        self._reserve(seq, 1, plan)
        return True

    def _expendable(self, seq: Sequence) -> tuple[int, tuple[int, int]]:
        return (seq.request.priority if self.waiting.policy == "priority" else 0, seq.age)

    def _reserve(self, seq: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Takes room that is known to exist; evicts where the free list is too short."""
        needed = self.manager.blocks_to_reserve(seq.id, num_tokens)
        if self.prefix is not None and needed > self.manager.allocator.num_free:
            self.prefix.evict(needed)
        copies = self.manager.reserve(seq.id, num_tokens)
        self.counts.allocated_blocks += needed
        self.counts.copied_blocks += len(copies)
        if copies:
            plan.copies[seq.id] = copies
        seq.num_writable = len(self.manager.tables[seq.id]) * self.manager.block_size
        seq.table_changed = True

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        """Its blocks go back (the full ones stay in the prefix cache until somebody needs them); it waits again."""
        plan.drop(seq)
        plan.preempted.append(seq)
        self._leave(seq)
        if seq.num_computed_tokens < seq.num_tokens:
            self.waiting.add(seq)  # a beam that waits for the others comes back when it has a token to compute
        seq.forget()
        self.counts.num_preemptions += 1
        seq.request.metrics.num_preemptions += 1

    def _start(self, seq: Sequence, plan: StepPlan) -> None:
        """A waiting sequence takes what the cache has of it, room for the rest, and its first chunk."""
        self.waiting.remove(seq)
        request = seq.request
        if self.prefix is None:
            self.manager.create(seq.id)
            cached = 0
        else:
            chain = self.admission.chain(seq)
            cached = self.prefix.attach(
                seq.id, seq.tokens, chain=chain, read=request.reads_cache, count=not seq.admitted
            )
            if request.explain and not seq.admitted:
                request.report = self.prefix.report(seq.id)
        self._enter(seq)
        seq.num_computed_tokens = cached
        self._reserve(seq, seq.num_tokens - cached, plan)
        if self.prefix is not None:
            keys = self.admission.chain(seq).keys
            self.admission.twins.lead(seq.id, keys.copy(), cached // self.manager.block_size)
        self._count_admission(seq, cached)
        plan.admitted.append(seq)
        plan.add(seq, min(seq.num_tokens - cached, self.config.max_num_batched_tokens - plan.num_tokens))

    def _count_admission(self, seq: Sequence, cached: int) -> None:
        recomputed = max(0, seq.num_lost_tokens - cached)
        seq.num_lost_tokens = 0
        self.counts.num_recomputed_tokens += recomputed
        seq.request.metrics.num_recomputed_tokens += recomputed
        if not seq.admitted and seq.index == 0:  # later admissions would count a request's own blocks as hits
            seq.request.num_cached_tokens = min(cached, seq.num_prompt_tokens)
            if self.prefix is not None and seq.request.reads_cache:
                self.counts.prefix_queries += seq.num_prompt_tokens
                self.counts.prefix_hits += cached
        seq.admitted = True

    def _unblock(self, plan: StepPlan) -> None:
        """Somebody waits and nobody can run.

        Either all that runs are beams that wait for one of their own, which has no room: the newest of them makes some
        (its candidates are known; it comes back when the search has moved on). Or nothing runs, and the oldest grew to
        the size of the pool before it was preempted: it ends with what it has.
        """
        if self.running:
            self._preempt(max(self.running, key=self._expendable), plan)
        elif not plan.preempted:
            oldest = self.waiting.oldest
            if oldest is not None and not self.fits_pool(oldest.num_tokens):
                plan.dry.append(oldest)

    # ---- what the engine decides ----

    def add(self, seq: Sequence) -> None:
        """A new sequence waits. Whether it can ever fit was asked before (``fits_pool``)."""
        self.waiting.add(seq)

    def commit(self, plan: StepPlan, failed: Container[Hashable] = ()) -> None:
        """The KV of the plan is written: lengths move, blocks that became full are published.

        What sequences in ``failed`` computed gave values that are no numbers, and is not published.
        """
        block_size, counts = self.manager.block_size, self.counts
        for seq, start, num_tokens in plan.chunks.values():
            self.manager.advance(seq.id, num_tokens)
            if num_tokens == 1 and start >= seq.num_prompt_tokens:
                counts.decode_tokens += 1
            else:
                counts.prefill_tokens += num_tokens
            seq.computed(num_tokens)
            num_full = seq.num_computed_tokens // block_size
            if self.prefix is not None and num_full > start // block_size and seq.id not in failed:
                self._publish(seq, num_full)

    def _publish(self, seq: Sequence, num_full: int) -> None:
        assert self.prefix is not None
        self.prefix.remember(seq.id, self.admission.chain(seq))
        seq.table_changed = True  # a block that another published first may have taken the place of its own
        self.admission.twins.published(seq.id, num_full)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` goes on from where ``parent`` is, on its blocks; where there is no seat for it, it waits."""
        full = self.admission.seats_held >= self.config.max_num_seqs
        if parent.status is not Status.RUNNING or full:
            self.waiting.add(child)
            return
        self.manager.fork(parent.id, child.id)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_writable = parent.num_writable = parent.num_computed_tokens
        child.chain = parent.chain.fork() if parent.chain is not None else None
        child.admitted = True
        self._enter(child)

    def give_up_seats(self, seq: Sequence) -> None:
        """A root's samples are about to be forked: from now on it counts for itself alone."""
        self.admission.seats_held -= seq.num_seats - 1
        seq.num_seats = 1

    def remove(self, seq: Sequence) -> None:
        """It ended, in whatever state: its blocks go back and nothing of it is left here. Harmless if called twice."""
        if seq.status is Status.RUNNING:
            self._leave(seq)
        elif seq.status is Status.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.chain = None

    def _enter(self, seq: Sequence) -> None:
        seq.status = Status.RUNNING
        seq.table_changed = True
        insort(self.running, seq, key=_age)
        self.admission.entered(seq)

    def _leave(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self.running.remove(seq)
        self.admission.left(seq)
        self.manager.free(seq.id)


def _age(seq: Sequence) -> tuple[int, int]:
    return seq.age
