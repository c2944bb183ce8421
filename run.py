"""The chapter's demonstration: python run.py paged [--impl reference|engine]

Three questions, each answered by doing it and counting: how much of the memory is used, what a fork costs, what a
shared prefix saves. ``reference`` is a paged cache in its plainest form, below, which gathers history to attend to it;
``engine`` is the production path: the package's own cache, its pool, and attention that reads through the block table.
Both write keys and values for every token and attend to them, so a count that rests on a wrong block cannot pass.
"""

from __future__ import annotations

import argparse
import json
from typing import Protocol

import torch

from pagedkv import AttentionBatch, KVCacheManager, PrefixCache, paged_attention, write_kv
from pagedkv.cache.pool import KVPool

BLOCK_SIZE, STATIC_SLOTS = 16, 1024
KV_HEADS, HEADS, HEAD_DIM = 2, 4, 32


def token_vectors(tokens: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, HEADS, D], k, v [T, KV_HEADS, D] of tokens at positions ``start``, ...: a stand-in for a model's layer."""
    position = torch.arange(start, start + len(tokens), dtype=torch.float64)
    phase = torch.tensor(tokens, dtype=torch.float64) * 0.7 + position * 1.3
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    rows = torch.sin(phase[:, None] * torch.linspace(0.1, 7.0, width, dtype=torch.float64)).float()
    q, k, v = rows.reshape(len(tokens), -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    return q, k, v


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T of S positions: q [T, HEADS, D] over k, v [S, KV_HEADS, D]."""
    new, length = q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / HEAD_DIM**0.5
    future = torch.arange(length) > torch.arange(length - new, length)[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


class Paged(Protocol):
    """What the demonstration asks of a paged cache with prefix caching."""

    tables: dict[str, list[int]]

    def start(self, seq: str, tokens: list[int]) -> int:
        """A new sequence with whatever is cached of ``tokens``; returns how many."""

    def run(self, seq: str, tokens: list[int]) -> torch.Tensor:
        """Computes the rest of ``tokens``: room, copies, keys and values, attention [T, HEADS, D]."""

    def fork(self, parent: str, child: str) -> None:
        """``child`` begins as ``parent`` is."""

    def in_use(self) -> int:
        """Blocks that sequences hold."""


class Reference:
    """A paged cache in its plainest form: lists, counts, tuples as keys, and a gather before attention."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.cached: dict[tuple[int, ...], int] = {}  # the whole prefix up to the end of a block -> that block
        self.kv = torch.zeros(num_blocks, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM)

    def allocate(self) -> int:
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def start(self, seq: str, tokens: list[int]) -> int:
        table: list[int] = []
        while (end := (len(table) + 1) * BLOCK_SIZE) < len(tokens) and tuple(tokens[:end]) in self.cached:
            table.append(self.cached[tuple(tokens[:end])])
            self.refs[table[-1]] += 1
        self.tables[seq], self.lengths[seq] = table, len(table) * BLOCK_SIZE
        return self.lengths[seq]

    def run(self, seq: str, tokens: list[int]) -> torch.Tensor:
        table, start = self.tables[seq], self.lengths[seq]
        q, k, v = token_vectors(tokens[start:], start)
        for position in range(start, len(tokens)):
            index = position // BLOCK_SIZE
            if index == len(table):
                table.append(self.allocate())
            elif self.refs[table[index]] > 1:  # somebody else reads this block: write into a copy
                copy = self.allocate()
                self.kv[copy] = self.kv[table[index]]
                self.refs[table[index]] -= 1
                table[index] = copy
            self.kv[table[index], position % BLOCK_SIZE] = torch.stack([k[position - start], v[position - start]])
        self.lengths[seq] = len(tokens)
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            block = table[end // BLOCK_SIZE - 1]
            if tuple(tokens[:end]) not in self.cached:
                self.cached[tuple(tokens[:end])] = block
                self.refs[block] += 1  # the cache's own reference
        history = self.kv[table].flatten(0, 1)[: len(tokens)]
        return attend(q, history[:, 0], history[:, 1])

    def fork(self, parent: str, child: str) -> None:
        self.tables[child], self.lengths[child] = self.tables[parent].copy(), self.lengths[parent]
        for block in self.tables[parent]:
            self.refs[block] += 1

    def in_use(self) -> int:
        return len({block for table in self.tables.values() for block in table})


class Engine:
    """The production path: tables and prefix cache of the package, its pool, attention through the table."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE)
        self.prefix = PrefixCache(self.manager)
        self.pool = KVPool(num_blocks, 1, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.tables = self.manager.tables

    def start(self, seq: str, tokens: list[int]) -> int:
        return self.prefix.attach(seq, tokens)

    def run(self, seq: str, tokens: list[int]) -> torch.Tensor:
        start = self.manager.lengths[seq]
        new = len(tokens) - start
        q, k, v = token_vectors(tokens[start:], start)
        self.prefix.evict(self.manager.blocks_to_reserve(seq, new))
        self.pool.copy_blocks(self.manager.reserve(seq, new))
        batch = AttentionBatch.build([self.tables[seq]], [len(tokens)], [new], BLOCK_SIZE)
        k_pool, v_pool = self.pool.k_pool[0], self.pool.v_pool[0]
        write_kv(k, v, k_pool, v_pool, batch.slot_mapping)
        attended = paged_attention(q, k_pool, v_pool, batch, scale=HEAD_DIM**-0.5)
        self.manager.advance(seq, new)
        self.prefix.remember(seq, tokens)
        return attended

    def fork(self, parent: str, child: str) -> None:
        self.manager.fork(parent, child)

    def in_use(self) -> int:
        self.manager.check()
        return len({block for table in self.tables.values() for block in table})


IMPLEMENTATIONS: dict[str, type[Reference] | type[Engine]] = {"reference": Reference, "engine": Engine}


def run_and_compare(cache: Paged, seq: str, tokens: list[int]) -> int:
    """Runs what is not cached and compares it with attention over the whole text from scratch; returns its length."""
    attended = cache.run(seq, tokens)
    expected = attend(*token_vectors(tokens, 0))[-len(attended) :]
    if not torch.allclose(attended, expected, atol=1e-5):
        raise SystemExit(f"{seq}: attention through the cache is off by {(attended - expected).abs().max():.2e}")
    return len(attended)


def utilisation(make: type[Reference] | type[Engine]) -> dict[str, float]:
    """32 requests of 20 to 499 tokens: fixed slots of 1,024 tokens against blocks of 16."""
    lengths = torch.randint(20, 500, (32,), generator=torch.Generator().manual_seed(2)).tolist()
    cache: Paged = make(1024)
    stored = 0
    for i, length in enumerate(lengths):
        tokens = [1000 * i + j for j in range(length)]
        cached = cache.start(f"request {i}", tokens)
        stored += cached + run_and_compare(cache, f"request {i}", tokens)
    static, paged = STATIC_SLOTS * len(lengths), BLOCK_SIZE * cache.in_use()
    return {
        "requests": len(lengths),
        "tokens_stored": stored,
        "static_slots_reserved": static,
        "paged_slots_reserved": paged,
        "static_utilization": round(stored / static, 3),
        "paged_utilization": round(stored / paged, 3),
    }


def forking(make: type[Reference] | type[Engine]) -> dict[str, int]:
    """Four samples of one 40-token prompt: sharing costs nothing, the first write of each copies one block."""
    cache: Paged = make(64)
    prompt = list(range(40))
    cache.start("parent", prompt)
    run_and_compare(cache, "parent", prompt)
    before = cache.in_use()
    for i in range(4):
        cache.fork("parent", f"sample {i}")
    forked = cache.in_use()
    for i in range(4):
        run_and_compare(cache, f"sample {i}", [*prompt, 100 + i])
    return {
        "parent_blocks": before,
        "new_blocks_after_4_forks": forked - before,
        "new_blocks_after_each_sample_writes_a_token": cache.in_use() - forked,
    }


def shared_prefix(make: type[Reference] | type[Engine]) -> dict[str, int]:
    """Eight requests that share a 96-token system prompt and have 8 tokens of their own."""
    cache: Paged = make(64)
    system = list(range(96))
    prompts = {f"request {i}": [*system, *range(1000 * (i + 1), 1000 * (i + 1) + 8)] for i in range(8)}
    computed = 0
    for seq, prompt in prompts.items():
        cache.start(seq, prompt)
        computed += run_and_compare(cache, seq, prompt)
    return {
        "prompt_tokens": sum(len(prompt) for prompt in prompts.values()),
        "tokens_prefilled": computed,
        "blocks_in_use": cache.in_use(),
        "blocks_without_sharing": sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The chapter's demonstration of paged attention and prefix caching.")
    parser.add_argument("demonstration", choices=["paged"])
    parser.add_argument("--impl", choices=sorted(IMPLEMENTATIONS), default="reference")
    make = IMPLEMENTATIONS[parser.parse_args().impl]
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread
    for demonstration in (utilisation, forking, shared_prefix):
        print(json.dumps(demonstration(make)))


if __name__ == "__main__":
    main()
