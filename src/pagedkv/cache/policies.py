"""Eviction policies other than plain LRU, behind the interface of ``eviction.py``.

    lru          least recently used; what a new PrefixCache has
    slru         segmented LRU: what was never reused leaves before what was (a scan of new prompts sweeps nothing out)
    lfu          least often used, the least recently used of those
    gdsf         greedy dual-size frequency (Cherkasova 1998): uses x cost of recomputing, with ageing
    queue-aware  LRU that spares what waiting requests will need

Each lets a block go only after the cached blocks that continue it. ``docs/adr`` has the figures behind the default.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

from pagedkv.cache.eviction import LRU, EvictionPolicy
from pagedkv.errors import InvalidRequest


class SegmentedLRU(EvictionPolicy):
    """Two LRU lists: blocks that were never reused stand in ``probation``, reused ones in ``protected``; O(1) per call.

    Probation gives up its blocks first. Protected holds at most ``share`` of the idle blocks; beyond that its oldest
    go to the young end of probation. Leaf first by construction: a reused block marks its ancestors as reused (each
    once in its life), so an ancestor is protected whenever its child is, and stands behind it in a list as in LRU.
    """

    def __init__(self, share: float = 0.8) -> None:
        if not 0.0 <= share <= 1.0:
            raise InvalidRequest(f"share is {share}; it lies between 0 and 1", field="share")
        self._share = share
        self._reused: set[int] = set()
        self._parent: dict[int, int] = {}
        self._probation: OrderedDict[int, float] = OrderedDict()
        self._protected: OrderedDict[int, float] = OrderedDict()

    def idle(self, block: int) -> None:
        if block not in self._reused:
            self._probation[block] = self.now
            return
        self._protected[block] = self.now
        if len(self._protected) > self._share * len(self):
            oldest, since = self._protected.popitem(last=False)
            self._probation[oldest] = since

    def busy(self, block: int) -> None:
        if self._probation.pop(block, None) is None:
            del self._protected[block]
        while block >= 0 and block not in self._reused:  # an ancestor may be in use since before it was ever idle
            self._reused.add(block)
            block = self._parent[block]

    def publish(self, block: int, parent: int) -> None:
        self._parent[block] = parent

    def pop(self) -> tuple[int, float]:
        block, since = (self._probation or self._protected).popitem(last=False)
        self._reused.discard(block)
        del self._parent[block]
        return block, since

    def clear(self) -> None:
        self._reused.clear()
        self._parent.clear()
        self._probation.clear()
        self._protected.clear()

    def idle_blocks(self) -> list[tuple[int, float]]:
        return [*self._probation.items(), *self._protected.items()]

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, block: object) -> bool:
        return block in self._probation or block in self._protected


class Ranked(EvictionPolicy):
    """Evicts the idle leaf of lowest rank: a heap of idle blocks without cached children; O(log n) per call.

    rank: (uses, depth, ageing) -> number. Uses count the publication and every return from idleness, depth is the
          number of ancestors, ageing is the rank of the block evicted last.
    Ties leave least recently used first.
    """

    def __init__(self, rank: Callable[[int, int, float], float]) -> None:
        self._rank = rank
        self._ageing = 0.0
        self._ticks = 0
        self._since: dict[int, float] = {}
        self._ticket: dict[int, int] = {}  # of an idle block: its last tick; a heap entry with another is stale
        self._heap: list[tuple[float, int, int]] = []
        self._uses: dict[int, int] = {}
        self._parent: dict[int, int] = {}
        self._depth: dict[int, int] = {}
        self._num_children: dict[int, int] = {}

    def idle(self, block: int) -> None:
        self._since[block] = self.now
        self._ticks += 1
        self._ticket[block] = self._ticks
        if not self._num_children.get(block):
            self._push(block)

    def busy(self, block: int) -> None:
        del self._since[block], self._ticket[block]
        self._uses[block] += 1

    def publish(self, block: int, parent: int) -> None:
        self._uses[block] = 1
        self._parent[block] = parent
        self._depth[block] = self._depth.get(parent, -1) + 1
        self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def pop(self) -> tuple[int, float]:
        if not self._since:
            raise KeyError("no block is idle")
        while True:
            rank, ticket, block = heapq.heappop(self._heap)
            if self._ticket.get(block) == ticket:
                break
        self._ageing = rank
        since = self._since.pop(block)
        parent = self._parent.pop(block)
        del self._ticket[block], self._uses[block], self._depth[block]
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._since:
                self._push(parent)
        return block, since

    def clear(self) -> None:
        for table in (self._since, self._ticket, self._heap, self._uses, self._parent, self._depth, self._num_children):
            table.clear()

    def idle_blocks(self) -> list[tuple[int, float]]:
        return list(self._since.items())

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, block: object) -> bool:
        return block in self._since

    def _push(self, block: int) -> None:
        rank = self._rank(self._uses[block], self._depth[block], self._ageing)
        heapq.heappush(self._heap, (rank, self._ticket[block], block))
        if len(self._heap) > 2 * len(self._since) + 64:  # mostly stale: keep it of the order of what is idle
            self._heap = [entry for entry in self._heap if self._ticket.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)


def lfu() -> Ranked:
    """Least often used first."""
    return Ranked(lambda uses, _depth, _ageing: uses)


def gdsf(parity: int = 1500) -> Ranked:
    """Greedy dual-size frequency: rank = ageing + uses x cost, all blocks being of one size.

    The cost of recomputing a block is 1 for its matrix products plus its attention over what stands before it, which
    grows with depth and equals the products at ``parity`` blocks (about 6 x hidden_size tokens: 24k for a 7B model).
    """
    return Ranked(lambda uses, depth, ageing: ageing + uses * (1.0 + depth / parity))


class QueueAware(EvictionPolicy):
    """LRU that spares blocks named by ``expect`` while there are others.

    queue: asked for those blocks before each round of evictions, if set (the scheduler sets it)

    ``spared`` followed by ``since`` is the true LRU order: ``pop`` moves wanted blocks from the old end of the one to
    the young end of the other, ``expect`` moves those that nobody wants any more back. So calls cost O(1) amortised,
    ``expect`` the blocks it names and those spared. A waiting request that needs a block needs all its ancestors too,
    so passing over wanted blocks keeps the order leaf first.
    """

    def __init__(self) -> None:
        self.queue: Callable[[], Iterable[int]] | None = None
        self._wanted: set[int] = set()
        self._spared: OrderedDict[int, float] = OrderedDict()
        self._since: OrderedDict[int, float] = OrderedDict()

    def expect(self, blocks: Iterable[int]) -> None:
        """The cached blocks that waiting requests will attach, ancestors included; replaces what was named before."""
        self._wanted = set(blocks)
        for block in [block for block in reversed(self._spared) if block not in self._wanted]:
            self._since[block] = self._spared.pop(block)
            self._since.move_to_end(block, last=False)

    def idle(self, block: int) -> None:
        self._since[block] = self.now

    def busy(self, block: int) -> None:
        if self._spared.pop(block, None) is None:
            del self._since[block]

    def publish(self, block: int, parent: int) -> None:
        """Nothing to note: the order needs no history."""

    def pop(self) -> tuple[int, float]:
        while self._since:
            block, since = self._since.popitem(last=False)
            if block not in self._wanted:
                return block, since
            self._spared[block] = since
        block, since = self._spared.popitem(last=False)
        self._wanted.discard(block)
        return block, since

    def pop_many(self, n: int) -> tuple[list[int], list[float]]:
        if self.queue is not None:
            self.expect(self.queue())
        return super().pop_many(n)

    def clear(self) -> None:
        for table in (self._wanted, self._spared, self._since):
            table.clear()

    def idle_blocks(self) -> list[tuple[int, float]]:
        return [*self._spared.items(), *self._since.items()]

    def __len__(self) -> int:
        return len(self._since) + len(self._spared)

    def __contains__(self, block: object) -> bool:
        return block in self._since or block in self._spared


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRU,
    "slru": SegmentedLRU,
    "lfu": lfu,
    "gdsf": gdsf,
    "queue-aware": QueueAware,
}


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy by its name."""
    if name not in POLICIES:
        raise InvalidRequest(f"policy {name!r} is none of {', '.join(POLICIES)}", field="policy")
    return POLICIES[name]()
