"""An engine over a model that costs nothing and notices everything.

The "KV" of a position is a hash of the whole text up to it, computed from what the *previous position's slot* holds.
So a slot that holds anything but exactly its prefix (I5) changes every token after it, and a test that compares with a
lone run fails. Writing into a block that has another owner (I4) raises at once. Free blocks are filled with rubbish
between steps, so nothing can lean on what happens to be left in them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pagedkv.attention.batch import AttentionBatch
from pagedkv.cache.keys import KeyScope
from pagedkv.cache.manager import BlockCopy, KVCacheManager
from pagedkv.cache.policies import make_policy
from pagedkv.cache.prefix import PrefixCache
from pagedkv.config import SchedulerConfig
from pagedkv.engine.engine import Engine
from pagedkv.engine.intake import Intake, Limits, Params, Prompt
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.plan import StepPlan
from pagedkv.engine.runner import ModelRunner
from pagedkv.engine.sampler import Sampler
from pagedkv.engine.sampling import Sampling
from pagedkv.engine.scheduler import Scheduler

VOCAB = 64
MASK = (1 << 62) - 1
ROOT = 0x1234567


def mix(state: int, token: int) -> int:
    """The hash of a text that is one token longer."""
    value = (state ^ (token + 1) * 0x9E3779B97F4A7C15) & MASK
    return (value * 0xBF58476D1CE4E5B9 + (value >> 29)) & MASK


def text_hash(tokens: Seq[int]) -> int:
    state = ROOT
    for token in tokens:
        state = mix(state, token)
    return state


class FakePool:
    """One number a slot. ``num_copied``: blocks copied so far."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.values = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.num_copied = 0
        self.k_pool: list[Tensor] = []
        self.v_pool: list[Tensor] = []
        self.k_scale: list[Tensor | None] = []
        self.v_scale: list[Tensor | None] = []

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        for source, destination in copies:
            self.values[destination] = self.values[source]
        self.num_copied += len(copies)


@dataclass
class FakeModel:
    """hidden [T, 1] is the hash of the text up to each token; ``batches`` remembers (tokens, sequences) of each pass.

    poison: hashes whose logits are NaN
    """

    manager: KVCacheManager
    vocab_size: int = VOCAB
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    batches: list[tuple[int, int]] = field(default_factory=list)
    poison: set[int] = field(default_factory=set)
    fail_at: int | None = None

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: FakePool, rows: Tensor | None = None) -> Tensor:
        if self.fail_at is not None and len(self.batches) >= self.fail_at:
            raise RuntimeError("the fake model was told to fail")
        size = batch.block_size
        values, refs = kv.values.reshape(-1), self.manager.allocator.refs
        hidden = torch.empty((len(token_ids), 1), dtype=torch.int64)
        starts, lengths, table = batch.query_start.tolist(), batch.seq_lens.tolist(), batch.block_table.tolist()
        tokens, slots, positions = token_ids.tolist(), batch.slot_mapping.tolist(), batch.positions.tolist()
        for row, (first, last) in enumerate(pairwise(starts)):
            assert positions[first:last] == list(range(lengths[row] - (last - first), lengths[row]))
            for t in range(first, last):
                position, slot = positions[t], slots[t]
                assert slot == table[row][position // size] * size + position % size
                assert refs[slot // size] == 1, "a block with another owner is written (I4)"
                before = position - 1
                state = ROOT if position == 0 else int(values[table[row][before // size] * size + before % size])
                values[slot] = hidden[t, 0] = mix(state, tokens[t])
        self.batches.append((len(tokens), len(lengths)))
        return hidden if rows is None else hidden[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        rows = [self.row(int(state)) for state in hidden[:, 0].tolist()]
        return torch.stack(rows) if rows else torch.empty((0, self.vocab_size))

    def row(self, state: int) -> Tensor:
        if state in self.poison:
            return torch.full((self.vocab_size,), torch.nan)
        seeds = (np.arange(1, self.vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(state)
        seeds = (seeds ^ (seeds >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        return torch.from_numpy(((seeds >> np.uint64(40)).astype(np.float32) / 2**24 * 6).astype(np.float32))


class FakeEngine(Engine):
    """An engine over FakeModel that keeps its plans and checks its books after every step."""

    model: FakeModel
    pool: FakePool
    plans: list[StepPlan]

    def checked_step(self) -> list[RequestOutput]:
        outputs = self.step()
        self.check()
        return outputs

    def check(self) -> None:
        """I1-I7 of everything that is here."""
        manager, scheduler = self.scheduler.manager, self.scheduler
        manager.check()
        for block in manager.allocator.free_blocks():
            self.pool.values[block] = -7 - block
        running = {seq.id: seq for seq in scheduler.running}
        assert len(running) <= scheduler.config.max_num_seqs
        assert {key for key in manager.tables if isinstance(key, tuple)} == set(running), (
            "only running ones hold blocks"
        )
        for key, seq in running.items():
            length = manager.lengths[key]
            assert 0 <= length == seq.num_computed_tokens <= seq.num_tokens
            state = ROOT
            for position in range(length):
                state = mix(state, seq.tokens[position])
                block, offset = divmod(position, manager.block_size)
                assert self.pool.values[manager.tables[key][block], offset] == state, (key, position)
        if self.scheduler.prefix is not None:
            allocator = manager.allocator
            in_use = {block for table in manager.tables.values() for block in table}
            assert allocator.num_free + allocator.num_evictable + len(in_use) == allocator.num_blocks  # I2

    def run(self, limit: int = 10_000) -> dict[str, RequestOutput]:
        """Steps until everything has ended; the last output of each request, by name."""
        last: dict[str, RequestOutput] = {}
        for _ in range(limit):
            if not self.has_unfinished():
                return last
            last.update((output.request_id, output) for output in self.checked_step())
        raise AssertionError(f"not finished after {limit} steps: {self.stats()}")

    def assert_balanced(self) -> None:
        """Everything ended: every block is free or cached, nobody is left anywhere."""
        stats = self.stats()
        assert (stats.num_running, stats.num_waiting, stats.blocks_in_use) == (0, 0, 0)
        assert not self.scheduler.manager.tables
        assert len(self.scheduler.admission.twins) == 0
        assert self.scheduler.admission.seats_held == 0
        assert sorted(self.runner.builder.free_rows) == list(range(self.scheduler.config.max_num_seqs))


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    prefix: bool = True,
    eviction_policy: str = "lru",
    max_model_len: int | None = None,
    eos_ids: Seq[int] = (),
    **scheduler: object,
) -> FakeEngine:
    """``scheduler``: fields of SchedulerConfig; 8 sequences and 64 tokens a step unless given."""
    options: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **scheduler}
    config = SchedulerConfig(**options)  # type: ignore[arg-type]
    manager = KVCacheManager(num_blocks, block_size)
    scope = KeyScope(model="fake")
    cache = PrefixCache(manager, scope, policy=make_policy(eviction_policy)) if prefix else None
    model, pool = FakeModel(manager), FakePool(num_blocks, block_size)
    capacity = num_blocks * block_size
    limits = Limits(VOCAB, min(max_model_len or capacity, 10**6), capacity)
    intake = Intake(limits, None, scope=scope if prefix else None, eos_ids=eos_ids, max_num_seqs=config.max_num_seqs)
    planner = Scheduler(config, manager, cache)
    runner = ModelRunner(model, pool, manager, config.max_num_seqs)
    engine = FakeEngine(intake, planner, runner, Sampling(Sampler(VOCAB), intake.voice), exact=True)
    engine.model, engine.pool, engine.plans = model, pool, []
    schedule = planner.schedule

    def remembered() -> StepPlan:
        plan = schedule()
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks.values())
        assert plan.num_tokens <= config.max_num_batched_tokens
        engine.plans.append(plan)
        return plan

    planner.schedule = remembered  # type: ignore[method-assign]
    return engine


def lone(prompt: Prompt, params: Params, *, eos_ids: Seq[int] = (), max_model_len: int | None = None) -> RequestOutput:
    """The request alone, in an engine of its own, with all the room there is and no cache."""
    engine = make_engine(512, prefix=False, eos_ids=eos_ids, max_model_len=max_model_len, max_num_seqs=16)
    engine.add_request("lone", prompt, params)
    return engine.run()["lone"]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(sample.token_ids) for sample in output.outputs]
