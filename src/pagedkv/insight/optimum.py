"""The yardsticks of a replay, computed from the trace alone: no manager, no prefix cache.

Both count as the engine does: leading full blocks of a prompt that are there, one token left to compute.
"""

from __future__ import annotations

import heapq
from array import array

from pagedkv.insight.trace import Trace

_NEVER = 1 << 60


def _references(trace: Trace, block_size: int) -> tuple[list[array[int]], int]:
    """For each request the numbers of its full blocks (equal number: equal block), and how many numbers there are."""
    numbers: dict[tuple[int, int], int] = {}
    references = [
        array("L", [numbers.setdefault(pair, len(numbers)) for pair in trace.blocks(request, block_size)])
        for request in trace.requests
    ]
    return references, len(numbers)


def unlimited_hits(trace: Trace, block_size: int) -> int:
    """Prompt tokens that a cache without limit would hit."""
    seen: set[tuple[int, int]] = set()
    hits = 0
    for request in trace.requests:
        pairs = trace.blocks(request, block_size)
        most = (request.num_prompt_tokens - 1) // block_size
        hits += block_size * next((i for i, pair in enumerate(pairs[:most]) if pair not in seen), most)
        seen.update(pairs)
    return hits


def optimum_hits(trace: Trace, block_size: int, num_blocks: int) -> int:
    """Prompt tokens that Belady's rule would hit: evict the block whose next use is farthest away (1966).

    The running request holds its blocks, the last incomplete one included. A block's ancestors are used whenever it
    is, so they are never used later; of two blocks used next by the same request the deeper one leaves first.
    A prompt that ends exactly with a block uses that block without hitting it (its last token is computed), which the
    rule does not know: where many prompts do, it is a hair below the true optimum.
    """
    references, count = _references(trace, block_size)
    next_request = array("q", [_NEVER]) * count  # of each block, the next request that uses it
    upcoming: list[array[int]] = [array("q")] * len(references)
    for at in range(len(references) - 1, -1, -1):
        upcoming[at] = array("q", [next_request[number] for number in references[at]])
        for number in references[at]:
            next_request[number] = at
    cached = bytearray(count)
    uses: array[int] = array("q", [0]) * count  # of a cached block, the request that uses it next
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale where ``uses`` says otherwise
    hits = num_cached = 0
    for at, (request, blocks) in enumerate(zip(trace.requests, references, strict=True)):
        needed = -(-request.num_prompt_tokens // block_size)
        if needed > num_blocks:
            continue
        most = (request.num_prompt_tokens - 1) // block_size
        hits += block_size * next((i for i, number in enumerate(blocks[:most]) if not cached[number]), most)
        for number in blocks:
            uses[number] = at  # held: whatever the heap says of it is stale
        missing = needed - sum(cached[number] for number in blocks)
        while num_cached + missing > num_blocks:
            later, _, number = heapq.heappop(heap)
            if cached[number] and uses[number] == -later:
                cached[number] = 0
                num_cached -= 1
        for depth, number in enumerate(blocks):
            num_cached += 1 - cached[number]
            cached[number] = 1
            uses[number] = upcoming[at][depth]
            heapq.heappush(heap, (-uses[number], -depth, number))
    return hits
