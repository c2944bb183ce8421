"""Run one sequence through a paged pool, without an engine: what the model tests compare with other programs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.cache.pool import KVPool
from pagedkv.model.decoder import LanguageModel


def run(model: LanguageModel, ids: Sequence[int], chunks: Sequence[int], *, block_size: int = 4) -> torch.Tensor:
    """Logits float32 [len(ids), vocab], computed ``chunks`` tokens at a time through a scrambled block table."""
    assert sum(chunks) == len(ids)
    pool, table = make_pool(model, len(ids), block_size)
    rows, done = [], 0
    for chunk in chunks:
        done += chunk
        batch = AttentionBatch.build([table], [done], [chunk], block_size)
        rows.append(model.logits(model.forward(torch.tensor(ids[done - chunk : done]), batch, pool)))
    return torch.cat(rows)


def greedy(
    model: LanguageModel, prompts: Sequence[Sequence[int]], num_tokens: int, *, block_size: int = 16
) -> list[list[int]]:
    """The ``num_tokens`` most probable tokens after each prompt, end of text or not; all prompts in one batch."""
    per_sequence = -(-(max(map(len, prompts)) + num_tokens) // block_size)
    pool, blocks = make_pool(model, len(prompts) * per_sequence * block_size, block_size)
    tables = [blocks[i * per_sequence : (i + 1) * per_sequence] for i in range(len(prompts))]
    new, outputs = [list(prompt) for prompt in prompts], [list[int]() for _ in prompts]
    lengths = [0] * len(prompts)
    for _ in range(num_tokens):
        query_lens = [len(tokens) for tokens in new]
        lengths = [length + extra for length, extra in zip(lengths, query_lens, strict=True)]
        batch = AttentionBatch.build(tables, lengths, query_lens, block_size)
        hidden = model.forward(torch.tensor([token for tokens in new for token in tokens]), batch, pool)
        last = torch.tensor(query_lens).cumsum(0) - 1
        new = [[token] for token in model.logits(hidden[last]).argmax(-1).tolist()]
        for output, tokens in zip(outputs, new, strict=True):
            output += tokens
    return outputs


def make_pool(model: LanguageModel, num_tokens: int, block_size: int) -> tuple[KVPool, list[int]]:
    """A pool with some room to spare, filled with NaN, and a table for one sequence in no order."""
    blocks = -(-num_tokens // block_size)
    config = model.config
    pool = KVPool(blocks + 3, config.num_layers, config.num_kv_heads, block_size, config.head_dim, dtype=model.dtype)
    pool.data.fill_(float("nan"))
    table = list(range(blocks + 3))
    random.Random(num_tokens).shuffle(table)
    return pool, table[:blocks]
