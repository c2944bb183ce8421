"""Engine: the loop that everything else serves. ``step()`` is schedule, run, sample, commit.

    add_request -> (Intake: refused or accepted) -> waiting -> running -> finished -> RequestOutput
                                                       ^ preempted  |
                                                       +------------+

Owns the requests, and what happens to their sequences between two steps. The scheduler decides what runs, the runner
computes it, ``Sampling`` chooses tokens, ``Voice`` turns them into text and says when a text ends. Not thread-safe:
one thread at a time (``async_llm.py`` gives it one of its own).

One request's failure is its own: whatever its values do to the sampler, to its text or to its logits ends it with
``RequestOutput.error`` set and finish_reason "abort", and no other request notices. A forward pass that raises ends
the requests that were in it, and the exception goes on to whoever called ``step``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from pagedkv.cache.keys import MediaSpan
from pagedkv.engine.beam import BeamMove
from pagedkv.engine.intake import Asked, Intake, Params, Prompt
from pagedkv.engine.metrics import EngineCounts, EngineStats
from pagedkv.engine.outputs import FinishReason, RequestOutput
from pagedkv.engine.plan import StepPlan
from pagedkv.engine.report import beams_of, output_of
from pagedkv.engine.request import Request, Sequence, Status
from pagedkv.engine.runner import ModelRunner
from pagedkv.engine.sampling import Drawn, Samples, Sampling
from pagedkv.engine.scheduler import Scheduler
from pagedkv.engine.turns import ChatTurns
from pagedkv.errors import QueueFull


class Engine:
    """Continuous batching over one model and one pool. ``build.py`` puts one together."""

    def __init__(
        self,
        intake: Intake,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampling: Sampling,
        *,
        turns: ChatTurns | None = None,
        exact: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.intake = intake
        self.scheduler = scheduler
        self.runner = runner
        self.sampling = sampling
        self.turns = turns
        self.exact = exact
        self.counts = EngineCounts()
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._changed: dict[int, Request] = {}  # requests with something to report
        self._next_key = 0

    # ---- requests come and go ----

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        media: Seq[MediaSpan] = (),
        arrival: float | None = None,
        final_only: bool = False,
        explain: bool = False,
    ) -> int:
        """A request enters the queue. Returns its key, the engine's own number for it.

        request_id: the caller's name for it; need not be unique
        priority:   lower goes first, under the ``priority`` policy
        cache_salt, adapter, media: what its cached blocks are valid under (``cache/keys.py``)
        arrival:    when it came, on the engine's clock; now, if left out
        final_only: ``step`` reports it once, when it has ended
        explain:    keep what the prefix cache had of it and why not more (``RequestOutput.report``)

        Raises InvalidRequest (RequestTooLong among them) or QueueFull; nothing is changed then.
        """
        limit = self.scheduler.config.max_num_queued_reqs
        if limit is not None and len(self.scheduler.waiting) >= limit:
            raise QueueFull(limit)
        asked = Asked(priority, cache_salt, adapter, media, final_only, explain)
        request = self.intake.make(self._next_key, request_id, prompt, params, asked)
        self._next_key += 1
        request.metrics.arrival = self._clock() if arrival is None else arrival
        self._requests[request.key] = request
        self.scheduler.add(request.sequences[0])
        return request.key

    def abort(self, request_id: str) -> list[RequestOutput]:
        """Ends every request of that name, in whatever state; an unknown or finished one is no error.

        Returns their last outputs. The blocks are back when this returns.
        """
        return [output for key in self.keys_of(request_id) for output in self.abort_key(key)]

    @property
    def all_keys(self) -> list[int]:
        """The keys of all unfinished requests."""
        return list(self._requests)

    def keys_of(self, request_id: str) -> list[int]:
        """The keys of the unfinished requests of that name."""
        return [key for key, request in self._requests.items() if request.request_id == request_id]

    def abort_key(self, key: int) -> list[RequestOutput]:
        """As ``abort``, for the one request that ``add_request`` gave this key."""
        request = self._requests.get(key)
        if request is None:
            return []
        self._end(request, "abort")
        self._changed.pop(key, None)
        return [output_of(request)]

    def has_unfinished(self) -> bool:
        return bool(self._requests) or bool(self._changed)

    def step(self) -> list[RequestOutput]:
        """One forward pass, and the outputs of the requests that have news. Empty when nothing could run."""
        return [output for _, output in self.step_keyed()]

    def step_keyed(self) -> list[tuple[int, RequestOutput]]:
        """As ``step``, each output with the key that ``add_request`` gave: names may be used twice, keys are not."""
        begin = self._clock()
        plan = self._schedule()
        scheduled = self._clock()
        self.counts.schedule_seconds += scheduled - begin
        if plan.chunks:
            self._run(plan)
        return self._news()

    def _schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.runner.release(plan.preempted)
        now = self._clock()
        for seq in plan.admitted:
            if seq.request.metrics.first_scheduled is None:
                seq.request.metrics.first_scheduled = now
        for seq in plan.dry:
            self._finish_dry(seq)
        return plan

    def _run(self, plan: StepPlan) -> None:
        try:
            result = self.runner.run(plan)
            computed = self._clock()
            samples = self.sampling.sample(plan, result)
        except BaseException as error:
            self._abandon(plan, error)
            raise
        sampled = self._clock()
        self._commit(plan, samples)
        self.counts.num_steps += 1
        self.counts.sample_seconds += sampled - computed
        self.counts.commit_seconds += self._clock() - sampled

    # ---- commit ----

    def _commit(self, plan: StepPlan, samples: Samples) -> None:
        self.scheduler.commit(plan, samples.failed)
        for root, others in samples.forks:
            self._fork(root, others)
        now = self._clock()
        for drawn in samples.drawn:
            if drawn.seq.status is not Status.FINISHED:
                self._append(drawn, now)
        for seq in samples.scored:
            self._finish(seq, "length")
        for (key, _), message in samples.failed.items():
            if key in self._requests:
                self._fail(self._requests[key], message)
        for request in {seq.request.key: seq.request for seq in samples.beams}.values():
            if request.key in self._requests:
                self._advance_beams(request, now)

    def _fork(self, root: Sequence, others: list[Sequence]) -> None:
        """The other samples of a root whose prompt is computed share its blocks from here on."""
        self.scheduler.give_up_seats(root)
        for other in others:
            root.request.sequences.append(other)
            self.scheduler.fork(root, other)

    def _append(self, drawn: Drawn, now: float) -> None:
        seq, token_id, logprobs = drawn
        request = seq.request
        seq.tokens.append(token_id)
        self._note_token(request, now)
        if logprobs is not None and seq.logprobs is not None:
            seq.logprobs.append(logprobs)
            seq.cumulative_logprob += logprobs[token_id].logprob
        assert seq.voice is not None
        try:
            finish = seq.voice.push(token_id)
        except Exception as error:
            self._fail(request, f"turning tokens into text failed: {type(error).__name__}: {error}")
            return
        grammar = seq.row.grammar if seq.row is not None else None
        if grammar is not None and not grammar.accept(token_id) and finish is None:
            self._fail(request, f"the grammar does not allow token {token_id}, which its mask did")
        elif finish is not None:
            self._finish(seq, finish.reason, finish.stop_reason)
        elif grammar is not None and grammar.finished:  # only the end can follow: no step is spent on it
            seq.voice.close()
            self._finish(seq, "stop")
        elif seq.num_output_tokens >= request.max_new_tokens:
            seq.voice.close()
            self._finish(seq, "length")

    def _note_token(self, request: Request, now: float) -> None:
        self.counts.generated_tokens += 1
        if request.metrics.first_token is None:
            request.metrics.first_token = now
        request.metrics.last_token = now
        self._changed[request.key] = request

    def _advance_beams(self, request: Request, now: float) -> None:
        """When all running beams have their candidates, the search moves: beams are forked, moved and dropped."""
        running = [seq for seq in request.sequences if seq.status is not Status.FINISHED]
        if any(seq.candidates is None for seq in running):
            return
        assert request.beam is not None
        moves = request.beam.step([seq.candidates or [] for seq in running])
        self.scheduler.give_up_seats(request.sequences[0])
        heirs = self._place_beams(request, running, moves)
        for seq, move in zip(heirs, moves, strict=True):
            seq.tokens.append(move.token_id)
            seq.candidates = None
            self._note_token(request, now)
            if seq.status is Status.WAITING and seq not in self.scheduler.waiting:
                self.scheduler.add(seq)
        for seq in running:
            if seq not in heirs:
                self._drop(seq)
        request.sequences = heirs or request.sequences
        if not heirs:
            best = request.beam.hypotheses()
            self._close(request, best[0].finish_reason if best else "length")

    def _place_beams(self, request: Request, running: list[Sequence], moves: Seq[BeamMove]) -> list[Sequence]:
        """The sequence that carries each move: the first child of a parent is the parent itself, the rest are forks."""
        heirs: list[Sequence] = []
        used: set[int] = set()
        for move in moves:
            parent = running[move.parent]
            if move.parent not in used:
                used.add(move.parent)
                heirs.append(parent)
                continue
            child = request.fork(parent)
            self.scheduler.fork(parent, child)
            heirs.append(child)
        return heirs

    # ---- endings ----

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """A sequence ends; its request too, if it was the last."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if self.turns is not None and reason != "abort" and seq.voice is not None:
            ended_by_id = reason == "stop" and not isinstance(stop_reason, str)
            ids = seq.tokens[seq.num_prompt_tokens : -1 if ended_by_id else None]
            self.turns.finished(seq.request.prompt_token_ids, ids, seq.voice.text, salt=seq.request.salt or "")
        self._drop(seq)
        if seq.request.finished:
            self._close(seq.request, reason)

    def _drop(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        self.runner.release((seq,))

    def _finish_dry(self, seq: Sequence) -> None:
        """It is alone in the pool and there is no room for one more token: it ends with what it has."""
        if seq.request.beam is not None:
            seq.request.beam.close()
            self._end(seq.request, "length")
            return
        if seq.voice is not None:
            seq.voice.close()
        self._finish(seq, "length")

    def _end(self, request: Request, reason: FinishReason) -> None:
        """All that is left of a request ends for the same reason."""
        for seq in request.sequences:
            if seq.status is not Status.FINISHED:
                if seq.voice is not None and request.error is None:
                    seq.voice.close()
                seq.finish_reason = reason
                self._drop(seq)
        self._close(request, reason)

    def _fail(self, request: Request, message: str) -> None:
        request.error = message
        self.counts.num_failed += 1
        self._end(request, "abort")

    def _abandon(self, plan: StepPlan, error: BaseException) -> None:
        """The forward pass raised: what it would have written, copies included, cannot be relied on."""
        for request in {chunk.seq.request.key: chunk.seq.request for chunk in plan.chunks.values()}.values():
            self._fail(request, f"the forward pass failed: {type(error).__name__}: {error}")

    def _close(self, request: Request, reason: FinishReason) -> None:
        """Nothing of the request runs any more. ``reason`` is that of its last sequence."""
        if self._requests.pop(request.key, None) is None:
            return
        if request.beam is not None:
            request.best = beams_of(request.beam, self.intake.tokenizer, aborted=reason == "abort")
        request.metrics.finished = self._clock()
        self.counts.finished[reason] += 1
        self._changed[request.key] = request

    # ---- what others see ----

    def _news(self) -> list[tuple[int, RequestOutput]]:
        changed = [r for r in self._changed.values() if r.finished or not r.final_only]
        self._changed.clear()
        return [(request.key, output_of(request)) for request in changed]

    def reset_prefix_cache(self) -> tuple[bool, int]:
        """Forgets every cached prefix. (whether all blocks are free now, how many are still in use by sequences)"""
        prefix = self.scheduler.prefix
        if prefix is None:
            return True, 0
        in_use = prefix.clear()
        self.scheduler.admission.twins.clear()
        return in_use == 0, in_use

    def stats(self) -> EngineStats:
        """A snapshot; O(1)."""
        allocator, prefix = self.scheduler.manager.allocator, self.scheduler.prefix
        plans, mine = self.scheduler.counts, self.counts
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=allocator.num_blocks,
            block_size=self.scheduler.manager.block_size,
            blocks_in_use=allocator.num_blocks - allocator.num_free - allocator.num_evictable,
            blocks_cached=allocator.num_evictable,
            blocks_free=allocator.num_free,
            prefix_queries=plans.prefix_queries,
            prefix_hits=plans.prefix_hits,
            num_preemptions=plans.num_preemptions,
            recomputed_tokens=plans.num_recomputed_tokens,
            prefill_tokens=plans.prefill_tokens,
            decode_tokens=plans.decode_tokens,
            generated_tokens=mine.generated_tokens,
            num_twin_waits=self.scheduler.admission.num_twin_waits,
            evicted_blocks=prefix.stats.evicted_blocks if prefix is not None else 0,
            allocated_blocks=plans.allocated_blocks,
            copied_blocks=plans.copied_blocks,
            finished=dict(mine.finished),
            num_failed=mine.num_failed,
            num_steps=mine.num_steps,
            schedule_seconds=mine.schedule_seconds,
            build_seconds=self.runner.build_seconds,
            forward_seconds=self.runner.forward_seconds,
            sample_seconds=mine.sample_seconds,
            commit_seconds=mine.commit_seconds,
            exact=self.exact,
        )
