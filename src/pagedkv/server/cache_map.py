"""The cache map at ``/cache``: a page, and the stream of events that it draws.

The engine's thread only copies a few lists (under a millisecond for a large pool); what is made of them happens
here. An event carries the blocks that changed, not the pool. Nothing runs while nobody looks, and no prompt text
leaves the process unless ``--cache-map-show-text`` was given.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from fastapi.sse import format_sse_event
from numpy.typing import NDArray

from pagedkv.cache.keys import decode_tokens
from pagedkv.engine.engine import Engine
from pagedkv.engine.metrics import EngineStats
from pagedkv.engine.request import Sequence as EngineSequence
from pagedkv.model.tokenizer import Tokenizer
from pagedkv.server.serving import Serving

router = APIRouter()

TICK = 0.5  # seconds between events
TREE_EVERY = 6  # ticks between two looks at the prefix tree
MAX_NODES = 200
MAX_REQUESTS = 100
MAX_NODE_BLOCKS = 4096  # ids listed for one node of the tree
_STATIC = files("pagedkv.server") / "static"


@dataclass(frozen=True)
class Look:
    """What was copied between two steps. ``parents`` and what follows it: None but for a look at the tree."""

    stats: EngineStats
    refs: list[int]
    cached: bytes
    idle: list[tuple[int, float]]
    requests: list[dict[str, Any]]
    parents: list[int] | None = None
    keys: list[bytes | None] | None = None
    tokens: list[bytes] | None = None
    hits: dict[int, int] | None = None


def look(engine: Engine, *, tree: bool) -> Look:
    """Runs in the engine's thread."""
    scheduler = engine.scheduler
    manager, prefix = scheduler.manager, scheduler.prefix
    running = list(scheduler.running)[:MAX_REQUESTS]
    common = Look(
        stats=engine.stats(),
        refs=list(manager.allocator.refs),
        cached=bytes(manager.allocator.cached),
        idle=prefix.policy.idle_blocks() if prefix is not None else [],
        requests=[_request(seq, manager.tables.get(seq.id, [])) for seq in running],
    )
    if not tree or prefix is None:
        return common
    index = prefix.index
    return replace(
        common,
        parents=list(index.parents),
        keys=list(index.keys),
        tokens=list(index.tokens),
        hits=dict(index.hits),
    )


def _request(seq: EngineSequence, table: Sequence[int]) -> dict[str, Any]:
    return {
        "key": f"r{seq.age[0]}.{seq.age[1]}",
        "id": seq.request.request_id if seq.index == 0 else f"{seq.request.request_id}/{seq.index}",
        "status": "prefill" if seq.in_prefill else "decode",
        "num_tokens": seq.num_tokens,
        "num_computed_tokens": seq.num_computed_tokens,
        "num_cached_tokens": seq.request.num_cached_tokens,
        "blocks": list(table),
    }


def block_states(seen: Look, now: float) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """(owners with the top bit for "cached", idle seconds) for every block."""
    cached = np.frombuffer(seen.cached, np.uint8).astype(bool)
    owners = np.minimum(np.array(seen.refs) - cached, 127).astype(np.uint8)
    idle = np.zeros(len(seen.refs), np.uint16)
    if seen.idle:
        blocks, since = (np.array(column) for column in zip(*seen.idle, strict=True))
        idle[blocks.astype(np.int64)] = np.clip(now - since, 0, 65535).astype(np.uint16)
    return owners | (cached.astype(np.uint8) << 7), idle


def changed_runs(changed: NDArray[np.bool_], gap: int = 64) -> list[tuple[int, int]]:
    """[start, end) spans that cover every change; spans closer than ``gap`` become one."""
    where = np.flatnonzero(changed)
    if not len(where):
        return []
    breaks = np.flatnonzero(np.diff(where) > gap)
    starts = where[np.concatenate([[0], breaks + 1])]
    ends = where[np.concatenate([breaks, [len(where) - 1]])] + 1
    return [(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]


def prefix_tree(seen: Look, tokenizer: Tokenizer | None, block_size: int) -> list[dict[str, Any]]:
    """The most reused prefixes, parents before children; a run of blocks without a branch is one node.

    A node's hits are the prompts that were found up to its last block or further. ``tokenizer``: None hides the text.
    """
    if seen.parents is None or seen.keys is None or seen.tokens is None:
        return []
    total: dict[int, int] = defaultdict(int)
    for block, count in (seen.hits or {}).items():
        while block >= 0:
            total[block] += count
            block = seen.parents[block]
    children: dict[int, list[int]] = defaultdict(list)
    for block, key in enumerate(seen.keys):
        if key is not None:
            children[seen.parents[block]].append(block)
    nodes: list[dict[str, Any]] = []
    roots = [block for node in children if node < 0 for block in children[node]]
    stack = [(block, 0) for block in sorted(roots, key=lambda b: total[b])]
    while stack and len(nodes) < MAX_NODES:
        first, depth = stack.pop()
        chain = [first]
        while len(below := children[chain[-1]]) == 1 and total[below[0]] == total[first]:
            chain.append(below[0])
        key = seen.keys[first] or b""
        node: dict[str, Any] = {
            "key": f"n{key.hex()}",
            "digest": key.hex()[:12],
            "depth": depth,
            "num_tokens": len(chain) * block_size,
            "hits": total[chain[-1]],
            "blocks": chain[:MAX_NODE_BLOCKS],
        }
        if tokenizer is not None:
            ids = [i for block in chain[:8] for i in decode_tokens(seen.tokens[block])]
            node["text"] = tokenizer.decode(ids, skip_special_tokens=False)[:120]
        nodes.append(node)
        stack += [(block, depth + 1) for block in sorted(children[chain[-1]], key=lambda b: total[b])]
    return nodes


def stats_of(stats: EngineStats) -> dict[str, Any]:
    return {
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "kv_cache_usage": stats.kv_cache_usage,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "num_preemptions": stats.num_preemptions,
        "num_free": stats.blocks_free,
        "num_cached_only": stats.blocks_cached,
        "num_in_use": stats.blocks_in_use,
    }


class Watcher:
    """One open page: what it was told last, and so what it has to be told next."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._states: NDArray[np.uint8] | None = None
        self._idle: NDArray[np.uint16] | None = None
        self._ticks = 0

    async def next(self) -> dict[str, Any]:
        tree = self._ticks % TREE_EVERY == 0
        seen = await self._serving.llm.inspect(lambda engine: look(engine, tree=tree))
        self._ticks += 1
        return await asyncio.to_thread(self._event, seen)

    def _event(self, seen: Look) -> dict[str, Any]:
        states, idle = block_states(seen, time.monotonic())
        event: dict[str, Any] = {"stats": stats_of(seen.stats), "requests": seen.requests}
        if self._states is None or self._idle is None:
            event["pool"] = self._pool(seen)
            changed = (states != 0) | (idle != 0)
        else:  # ages move by themselves: only a twentieth more is news
            changed = (states != self._states) | (idle > self._idle * 1.05 + 1) | (idle < self._idle)
        event["blocks"] = [
            {"start": a, "state": _base64(states[a:b]), "idle": _base64(idle[a:b])} for a, b in changed_runs(changed)
        ]
        if self._idle is not None:
            shown = self._idle.copy()
            for a, b in changed_runs(changed):
                shown[a:b] = idle[a:b]
            idle = shown
        self._states, self._idle = states, idle
        if seen.parents is not None:
            shown_text = self._serving.config.cache_map_show_text
            tokenizer = self._serving.llm.tokenizer if shown_text else None
            event["tree"] = prefix_tree(seen, tokenizer, seen.stats.block_size)
            event["tree_note"] = "" if shown_text else "digests; text is hidden"
        return event

    def _pool(self, seen: Look) -> dict[str, Any]:
        return {
            "num_blocks": seen.stats.num_blocks,
            "block_size": seen.stats.block_size,
            "bytes_per_block": self._serving.llm.bytes_per_block,
            "model": self._serving.names[0],
        }


def _base64(values: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


@router.get("/", include_in_schema=False)
async def front() -> Response:
    """Whoever opens the server in a browser wants to see something."""
    return RedirectResponse("cache")


@router.get("/cache", include_in_schema=False)
async def page() -> Response:
    return Response((_STATIC / "cache.html").read_bytes(), media_type="text/html; charset=utf-8", headers=_POLICY)


@router.get("/cache/cache.js", include_in_schema=False)
async def script() -> Response:
    return Response((_STATIC / "cache.js").read_bytes(), media_type="text/javascript; charset=utf-8")


@router.get("/cache/cache.css", include_in_schema=False)
async def style() -> Response:
    return Response((_STATIC / "cache.css").read_bytes(), media_type="text/css; charset=utf-8")


_POLICY = {"Content-Security-Policy": "default-src 'self'; img-src data:; style-src 'self' 'unsafe-inline'"}


@router.get("/cache/events", include_in_schema=False)
async def events(request: Request) -> StreamingResponse:
    serving: Serving = request.app.state.serving

    async def stream() -> AsyncIterator[bytes]:
        watcher = Watcher(serving)
        while serving.llm.is_alive and not serving.draining:
            yield format_sse_event(data_str=json.dumps(await watcher.next()))
            await asyncio.sleep(TICK)

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
