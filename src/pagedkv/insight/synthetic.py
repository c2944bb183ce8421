"""Made-up traffic for pictures and examples: chats that come back, system prompts that many share, and strangers."""

from __future__ import annotations

import random
from itertools import count

from pagedkv.errors import InvalidRequest
from pagedkv.insight.trace import Trace, TraceRequest

CHUNK_TOKENS = 128
SYSTEM_PROMPTS = 4  # of 4 chunks each; a new chat begins with one of them
MOST_CHUNKS = 40  # a chat that has grown to this ends


def synthetic_trace(num_requests: int, *, open_chats: int = 64, strangers: float = 0.2, seed: int = 0) -> Trace:
    """``num_requests`` requests, one a second, the same for the same seed.

    open_chats: chats under way at a time. Each turn repeats the chat so far and adds 1 to 4 chunks; some chats are far
                livelier than others (the turn goes to the smaller of two random numbers)
    strangers:  share of requests that begin like nothing before them and never come back, of 4 to 16 chunks
    """
    for name, value, least in (("num_requests", num_requests, 1), ("open_chats", open_chats, 1)):
        if value < least:
            raise InvalidRequest(f"{name} is {value}; at least {least} is needed", field=name)
    if not 0.0 <= strangers <= 1.0:
        raise InvalidRequest(f"strangers is {strangers}; a share from 0 to 1 is needed", field="strangers")
    draw, ids = random.Random(seed), count()
    systems = [[next(ids) for _ in range(4)] for _ in range(SYSTEM_PROMPTS)]
    chats = [list(draw.choice(systems)) for _ in range(open_chats)]
    requests = []
    for at in range(num_requests):
        if draw.random() < strangers:
            chunks = [next(ids) for _ in range(draw.randint(4, 16))]
        else:
            chat = min(draw.randrange(open_chats), draw.randrange(open_chats))
            chats[chat] = chunks = [*chats[chat], *(next(ids) for _ in range(draw.randint(1, 4)))]
            if len(chunks) >= MOST_CHUNKS:
                chats[chat] = list(draw.choice(systems))
        unfinished = draw.randrange(CHUNK_TOKENS)  # the last chunk is rarely full
        requests.append(TraceRequest(float(at), len(chunks) * CHUNK_TOKENS - unfinished, draw.randint(20, 200), chunks))
    return Trace("synthetic", CHUNK_TOKENS, requests)
