"""Who is computing which block right now, so that nobody computes it a second time.

A running sequence in prefill *leads* the keys of its full blocks that are not published yet. A waiting sequence whose
next uncached full block has such a key may wait for it, and then hits. The keys stand for everything before them and
for the scope, so sequences of different salts, adapters or pictures can never meet here.

Keys leave as they are published, or all at once when the leader ends in any way; then the next waiting sequence finds
nobody to wait for and leads itself.

Costs: O(1) per block led; O(log blocks) per question. No torch, no tokens: digests only.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass
class _Leader:
    name: Hashable
    keys: Seq[bytes]
    published: int  # keys below this index are in the prefix cache


class Twins:
    """The blocks under way."""

    def __init__(self) -> None:
        self._leaders: dict[Hashable, _Leader] = {}
        self._computing: dict[bytes, _Leader] = {}
        self.version = 0  # changes whenever a block under way was published or given up

    def __len__(self) -> int:
        return len(self._leaders)

    def lead(self, name: Hashable, keys: Seq[bytes], start: int) -> None:
        """``name`` computes ``keys[start:]``; of those that another computes already, the first stays the leader."""
        if start < len(keys):
            leader = _Leader(name, keys, start)
            self._leaders[name] = leader
            self._claim(leader)

    def published(self, name: Hashable, num_blocks: int) -> None:
        """The first ``num_blocks`` blocks of ``name`` are in the cache."""
        leader = self._leaders.get(name)
        if leader is None:
            return
        self.version += 1
        for i in range(leader.published, min(num_blocks, len(leader.keys))):
            self._computing.pop(leader.keys[i], None)  # whoever else computes it: it can be hit from now on
        leader.published = max(leader.published, num_blocks)
        if leader.published >= len(leader.keys):
            del self._leaders[name]

    def drop(self, name: Hashable) -> None:
        """``name`` ended or was preempted. What it led and another computes too is led by that one from now on."""
        leader = self._leaders.pop(name, None)
        if leader is None:
            return
        self.version += 1
        for key in leader.keys[leader.published :]:
            if self._computing.get(key) is leader:
                del self._computing[key]
        for other in self._leaders.values():
            self._claim(other)

    def clear(self) -> None:
        """Nothing that is under way will be published."""
        self._leaders.clear()
        self._computing.clear()
        self.version += 1

    def shared(self, keys: Seq[bytes], start: int, end: int) -> tuple[Hashable, int] | None:
        """Who computes ``keys[start]``, and up to which block (at most ``end``, exclusive) it goes on with these keys.

        None: nobody does.
        """
        leader = self._computing.get(keys[start]) if start < end else None
        if leader is None:
            return None
        low, high = start + 1, min(end, len(leader.keys))
        while low < high:  # an equal key means that everything before it is equal
            middle = (low + high + 1) // 2
            if keys[middle - 1] == leader.keys[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return leader.name, low

    def _claim(self, leader: _Leader) -> None:
        for key in leader.keys[leader.published :]:
            self._computing.setdefault(key, leader)
