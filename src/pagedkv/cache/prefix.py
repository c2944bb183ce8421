"""PrefixCache: sequences that begin alike share the blocks of what they have in common.

Owns:    one reference to every cached block (``BlockIndex`` says which text it holds), what is known of each
         sequence (its key chain, how much of it is published), the statistics.
Rules:   a block is published after its KV is written, when it is full, and under one key; a second copy of the same
         content is given up for the first. At least one token of a prompt is left to compute.
         Nothing in use is evicted, everything counted in ``num_evictable`` can be.
         Tokens are never taken from another scope, other media or another history.
Cost:    O(1) per block. ``remember`` continues where it stopped, so calling it every step is cheap.

The life of a cached block:   in use, private --remember--> in use, cached --last release--> idle --evict--> free
                                                                  ^----------- attach -------'
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from pagedkv.cache.eviction import LRU, EvictionPolicy
from pagedkv.cache.evictions import EvictionLog
from pagedkv.cache.index import BlockIndex
from pagedkv.cache.keys import KeyChain, KeyScope, MediaSpan, encode_tokens
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.match import Match
from pagedkv.cache.report import AttachReport, PrefixStats, explain
from pagedkv.errors import BlockStateError, InvalidRequest


@dataclass(slots=True)
class _Sequence:
    """What the cache knows of one sequence.

    chain:          keys of its text; ``owns_chain`` is False while it is the caller's
    num_published:  its leading blocks that are cached, all held through its table
    generation:     of the cache when the sequence began; after a ``clear`` it publishes nothing more
    match:          what attach found; num_evicted: how many blocks had been evicted by then
    frontier:       the key of the block that it computes next, if that is known
    """

    chain: KeyChain
    owns_chain: bool
    generation: int
    num_published: int = 0
    match: Match | None = None
    num_evicted: int = 0
    frontier: bytes | None = None


class PrefixCache:
    """Prefix caching over a KVCacheManager or a PagedKVCache.

    scope:   what keys are valid under where a call names no other scope
    policy:  which idle block is evicted first; least recently used unless given
    clock:   seconds; used for reports only
    """

    def __init__(
        self,
        cache: KVCacheManager,
        scope: KeyScope | None = None,
        *,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if cache.follower is not None:
            raise BlockStateError("this cache has a prefix cache already")
        self.scope = KeyScope() if scope is None else scope
        self.stats = PrefixStats()
        self.index = BlockIndex(cache.allocator.num_blocks, cache.block_size)
        self.policy: EvictionPolicy = LRU() if policy is None else policy
        self.evictions = EvictionLog()
        self._manager = cache
        self._clock = clock
        self._generation = 0
        self._sequences: dict[Hashable, _Sequence] = {}
        self._frontiers: dict[bytes, Hashable] = {}
        cache.follower = self
        cache.allocator.listener = self.policy

    @property
    def num_evictable(self) -> int:
        """Blocks that only this cache holds; ``evict`` can free every one of them."""
        return len(self.policy)

    @property
    def num_cached(self) -> int:
        """Blocks under a key, in use or not."""
        return len(self.index)

    def chain(self, scope: KeyScope | None = None, media: Sequence[MediaSpan] = ()) -> KeyChain:
        """An empty chain for a request to keep, so that each of its tokens is hashed once in its life."""
        return KeyChain(self._manager.block_size, self.scope if scope is None else scope, media)

    def match(
        self,
        prompt: Sequence[int],
        *,
        scope: KeyScope | None = None,
        media: Sequence[MediaSpan] = (),
        chain: KeyChain | None = None,
    ) -> Match:
        """What ``attach`` would find now. Reads only: no reference, no change in the order of eviction."""
        return self._match(self._chain_for(prompt, scope, media, chain), len(prompt))

    def attach(
        self,
        seq: Hashable,
        prompt: Sequence[int],
        *,
        scope: KeyScope | None = None,
        media: Sequence[MediaSpan] = (),
        chain: KeyChain | None = None,
        read: bool = True,
        count: bool = True,
    ) -> int:
        """Creates ``seq`` with the longest cached prefix of ``prompt`` and returns the tokens reused.

        Shares the blocks of the prefix; the sequence's length is what was reused, at most ``len(prompt) - 1``.
        A prefix that ends inside a cached block shares that block too (the first write copies it), unless the pool
        has no block to spare for the copy.

        scope, media: fixed for the life of the sequence; None: the cache's own scope
        chain:  the caller's chain of this prompt (it carries scope and media); extended here if it is behind
        read:   False creates the sequence in its scope and takes nothing from the cache
        count:  False leaves the statistics alone (a preempted request that comes back was counted before)

        Raises SequenceExists, or InvalidRequest for an empty prompt or a token that is no id; nothing is changed.
        """
        kept = self._chain_for(prompt, scope, media, chain)
        match = self._match(kept, len(prompt)) if read else Match.nothing(len(prompt))
        self.policy.now = self._clock()
        table = match.blocks if match.source is None else [*match.blocks, match.source]
        self._manager.adopt(seq, table, match.num_cached_tokens)
        state = _Sequence(kept, chain is None, self._generation, len(match.blocks), match, self.evictions.total)
        self._sequences[seq] = state
        self._move_frontier(seq, state)
        if count and read:
            self.stats.queries += len(prompt)
            self.stats.hits += match.num_cached_tokens
            if match.blocks:
                last = match.blocks[-1]
                self.index.hits[last] = self.index.hits.get(last, 0) + 1
        return match.num_cached_tokens

    def remember(self, seq: Hashable, tokens: Sequence[int] | KeyChain) -> int:
        """Publishes the full blocks of ``seq`` whose KV is written. Returns how many keys are new.

        tokens: the text of the sequence from its first token, prompt and generated, or the caller's chain of it;
                what goes beyond the sequence's length is not looked at
        """
        length = self._manager.length(seq)
        state = self._sequences.get(seq)
        if state is None:
            state = self._sequences[seq] = _Sequence(self.chain(), True, self._generation)
        num_tokens = tokens.num_tokens if isinstance(tokens, KeyChain) else len(tokens)
        full = min(length, num_tokens) // self._manager.block_size
        if full <= state.num_published or state.generation != self._generation:
            return 0
        self._follow(state, tokens, full)
        published = self._publish(self._manager.tables[seq], state, full)
        self.stats.published_blocks += published
        self._move_frontier(seq, state)
        return published

    def evict(self, blocks_wanted: int) -> int:
        """Drops cached blocks that nobody uses until ``blocks_wanted`` blocks are free, or none is left to drop.

        Returns the blocks freed. Never touches a block in use.
        """
        allocator = self._manager.allocator
        num = min(blocks_wanted - allocator.num_free, len(self.policy))
        if num <= 0:
            return 0
        blocks, since = self.policy.pop_many(num)
        self.evictions.add(self.index.remove(blocks), since, self._clock(), blocks_wanted)
        self.stats.evicted_blocks += num
        return allocator.uncache_many(blocks)

    def clear(self) -> int:
        """Drops every key at once. Returns how many of the blocks are still in use by sequences.

        Those return to the free list when their sequences end. Sequences that exist now publish nothing more.
        """
        allocator = self._manager.allocator
        for seq in self._manager.tables:
            if seq not in self._sequences:
                self._sequences[seq] = _Sequence(self.chain(), True, self._generation)
        dropped = self.index.clear()
        freed = allocator.uncache_many(dropped)
        self.policy.clear()
        self._frontiers.clear()
        self._generation += 1
        return len(dropped) - freed

    def report(self, seq: Hashable) -> AttachReport:
        """What ``attach`` found for ``seq`` and why it stopped there. Built when asked, at no cost before."""
        self._manager.length(seq)
        state = self._sequences.get(seq)
        if state is None or state.match is None:
            raise BlockStateError(f"sequence {seq!r} was not made by attach")
        return explain(self.index, state.chain, state.match, self.evictions, state.num_evicted)

    # What becomes of sequences; the manager calls these.

    def forked(self, parent: Hashable, child: Hashable) -> None:
        """The child is in its parent's scope, with the same blocks published."""
        state = self._sequences.get(parent)
        if state is not None:
            self._sequences[child] = replace(state, chain=state.chain.fork(), owns_chain=True, frontier=None)

    def truncated(self, seq: Hashable, length: int) -> None:
        """Blocks beyond the new length are not this sequence's any more; a last one cut short will be copied."""
        state = self._sequences.get(seq)
        if state is not None:
            state.num_published = min(state.num_published, length // self._manager.block_size)

    def freed(self, seq: Hashable) -> None:
        """Nothing of the sequence is kept."""
        state = self._sequences.pop(seq, None)
        if state is not None and state.frontier is not None and self._frontiers.get(state.frontier) == seq:
            del self._frontiers[state.frontier]

    def check(self) -> None:
        """Verifies I6, that exactly the idle blocks are evictable, and that they can leave in leaf-first order."""
        self.index.check()
        allocator, cached = self._manager.allocator, set(self.index.blocks.values())
        if {block for block, flag in enumerate(allocator.cached) if flag} != cached:
            raise BlockStateError("the allocator and the index disagree on what is cached")
        idle = {block for block in cached if allocator.refs[block] == 1}
        if len(self.policy) != len(idle) or any(block not in self.policy for block in idle):
            raise BlockStateError(f"{len(self.policy)} blocks are counted evictable; {len(idle)} are idle")
        for block in idle:
            if not idle.issuperset(self.index.children.children(block)):
                raise BlockStateError(f"block {block} is idle and a block that continues it is in use")

    def _chain_for(
        self, prompt: Sequence[int], scope: KeyScope | None, media: Sequence[MediaSpan], chain: KeyChain | None
    ) -> KeyChain:
        if len(prompt) == 0:
            raise InvalidRequest("the prompt is empty; at least one token is needed", field="prompt")
        if chain is None:
            chain = self.chain(scope, media)
        elif chain.block_size != self._manager.block_size or (scope is not None and scope != chain.scope) or media:
            raise InvalidRequest("the chain was made for another block size, scope or media", field="chain")
        behind = chain.num_tokens
        if behind < len(prompt):
            chain.extend(prompt[behind:])
        return chain

    def _match(self, chain: KeyChain, num_tokens: int) -> Match:
        size, refs = self._manager.block_size, self._manager.allocator.refs
        blocks = self.index.find(chain, (num_tokens - 1) // size)
        full = len(blocks)
        node = blocks[-1] if blocks else self.index.root(chain.scope)
        source, partial = self.index.nearest(node, chain, full, num_tokens - 1 - full * size)
        num_idle = [refs[block] for block in blocks].count(1)
        next_key = chain.keys[full] if (full + 1) * size <= num_tokens else None
        match = Match(
            num_tokens=num_tokens,
            num_cached_tokens=full * size,
            blocks=blocks,
            num_idle=num_idle,
            nearest=None if source is None else self.index.tokens[source],
            twin=None if next_key is None else self._frontiers.get(next_key),
        )
        if not partial or source is None:
            return match
        source_idle = int(refs[source] == 1)
        fresh = self._manager.blocks_needed(num_tokens) - full
        if self._manager.num_available - num_idle - source_idle < fresh:
            return replace(match, given_up=True)
        return replace(match, num_cached_tokens=full * size + partial, source=source, num_idle=num_idle + source_idle)

    def _follow(self, state: _Sequence, tokens: Sequence[int] | KeyChain, full: int) -> None:
        """Makes the state's chain the chain of ``tokens``, at least up to ``full`` blocks."""
        size = self._manager.block_size
        if isinstance(tokens, KeyChain):
            if tokens.scope != state.chain.scope or tokens.block_size != size:
                raise InvalidRequest("the chain is of another scope or block size than its sequence", field="tokens")
            state.chain, state.owns_chain = tokens, False
            return
        chain = state.chain
        start, known = state.num_published, min(len(chain.keys), full)
        given = encode_tokens(tokens[start * size : known * size])
        same = start + next(
            (i for i in range(known - start) if given[i * size * 4 : (i + 1) * size * 4] != chain.chunks[start + i]),
            known - start,
        )
        if same < known or known < full:
            if not state.owns_chain:
                state.chain, state.owns_chain = chain.fork(), True
                chain = state.chain
            chain.truncate(same)
            chain.extend(tokens[same * size : full * size])

    def _publish(self, table: list[int], state: _Sequence, full: int) -> int:
        """Gives blocks ``num_published .. full`` of the table their keys; returns how many keys are new."""
        allocator, index, chain = self._manager.allocator, self.index, state.chain
        start = state.num_published
        node = table[start - 1] if start else index.root(chain.scope)
        for i in range(start, full):
            own, present = table[i], index.blocks.get(chain.keys[i])
            if present is None:
                parent, new = index.add(table[i:full], node, chain, i)
                allocator.cache_many(table[i : i + new])
                self.policy.publish_many(table[i : i + new], parent)
                state.num_published = i + new
                return new
            if not index.holds(present, node, chain, i):
                break  # another text under the same digest keeps the key; what follows has no cached parent
            if present != own:
                allocator.share(present)
                table[i] = present
                allocator.release(own)
            node = present
            state.num_published = i + 1
        return 0

    def _move_frontier(self, seq: Hashable, state: _Sequence) -> None:
        if state.frontier is not None and self._frontiers.get(state.frontier) == seq:
            del self._frontiers[state.frontier]
        keys, at = state.chain.keys, state.num_published
        state.frontier = keys[at] if at < len(keys) else None
        if state.frontier is not None:
            self._frontiers.setdefault(state.frontier, seq)
