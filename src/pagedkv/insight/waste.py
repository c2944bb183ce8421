"""What blocks waste and what sharing saves, for given lengths: plain counts, no model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.prefix import PrefixCache


def slots(lengths: Sequence[int], block_size: int) -> int:
    """Slots that whole blocks reserve for sequences of these lengths: less than block_size - 1 too many in each."""
    return sum(-(-length // block_size) * block_size for length in lengths)


def utilization(lengths: Sequence[int], block_size: int) -> float:
    """Tokens over slots, 0 to 1."""
    return sum(lengths) / slots(lengths, block_size)


def chapter_lengths(count: int = 32) -> list[int]:
    """The chapter's 32 lengths of 20 to 499 tokens."""
    import torch

    generator = torch.Generator().manual_seed(2)
    return [int(n) for n in torch.randint(20, 500, (count,), generator=generator)]


def tokens_computed(shared: int, own: int, num_requests: int, block_size: int) -> list[int]:
    """Prompt tokens computed in all after 1, 2, ... requests that share a prefix, by a real manager and prefix cache.

    Requests come one after another and leave when their prompt is done.
    """
    draw = random.Random(0)
    prefix_tokens = [draw.randrange(1 << 20) for _ in range(shared)]
    length = shared + own
    manager = KVCacheManager((num_requests + 1) * -(-length // block_size), block_size)
    prefix = PrefixCache(manager)
    totals, total = [], 0
    for number in range(num_requests):
        prompt = prefix_tokens + [draw.randrange(1 << 20) for _ in range(own)]
        reused = prefix.attach(number, prompt)
        manager.reserve(number, length - reused)
        manager.advance(number, length - reused)
        prefix.remember(number, prompt)
        manager.free(number)
        total += length - reused
        totals.append(total)
    return totals
