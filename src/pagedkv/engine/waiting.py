"""The queue of sequences that hold no blocks, and the order in which they are tried.

Guarantee (the age bound): nobody sees more than ``max_overtakes`` admissions of younger requests. The oldest waiting
sequence that has seen that many is the only candidate until it is admitted, whatever the policy prefers. It is enough
to watch the oldest: whoever is older was overtaken at least as often, so the aged are served in order of age.

How often the oldest was overtaken is not counted one by one (ten thousand may wait). Since it came, ``departures``
rose by everything that left the queue; at most ``older`` of these were older than it; the rest overtook it. Departures
that were no admissions (aborts) count too, which can only make its turn come sooner.

Costs: add and remove O(log n) comparisons and one memmove; candidates O(LOOKAHEAD).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from pagedkv.engine.request import Sequence

LOOKAHEAD = 64  # how many of the queue a step looks at; the rest are younger (or less urgent) than all of these


class _Entry(NamedTuple):
    departures: int
    older: int


class WaitingQueue:
    """Sequences by age and, under ``priority``, also by urgency (lower number first, then age)."""

    def __init__(self, policy: str, max_overtakes: int) -> None:
        self.policy = policy
        self.max_overtakes = max_overtakes
        self.version = 0  # changes whenever somebody comes or goes
        self._by_age: list[Sequence] = []
        self._by_urgency: list[Sequence] = []
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._departures = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.age in self._entries

    def add(self, seq: Sequence) -> None:
        """A new sequence, or a preempted one: that one takes the place its age gives it."""
        place = bisect_left(self._by_age, seq.age, key=_age)
        self._by_age.insert(place, seq)
        if self.policy == "priority":
            self._by_urgency.insert(bisect_left(self._by_urgency, _urgency(seq), key=_urgency), seq)
        self._entries[seq.age] = _Entry(self._departures, place)
        self.version += 1

    def remove(self, seq: Sequence) -> None:
        """It was admitted, or it ended while it waited."""
        del self._entries[seq.age]
        del self._by_age[bisect_left(self._by_age, seq.age, key=_age)]
        if self.policy == "priority":
            del self._by_urgency[bisect_left(self._by_urgency, _urgency(seq), key=_urgency)]
        self._departures += 1
        self.version += 1

    @property
    def oldest(self) -> Sequence | None:
        return self._by_age[0] if self._by_age else None

    def overtaken(self, seq: Sequence) -> int:
        """At least as often as younger sequences were admitted before ``seq``, which must be the oldest."""
        entry = self._entries[seq.age]
        return self._departures - entry.departures - entry.older

    def aged(self) -> Sequence | None:
        """The oldest, if its turn has come; then nobody else may be admitted."""
        oldest = self.oldest
        return oldest if oldest is not None and self.overtaken(oldest) >= self.max_overtakes else None

    def candidates(self) -> list[Sequence]:
        """The first LOOKAHEAD by age, or by urgency; ``lpm`` sorts them by what the cache holds of them."""
        return (self._by_urgency if self.policy == "priority" else self._by_age)[:LOOKAHEAD]


def _age(seq: Sequence) -> tuple[int, int]:
    return seq.age


def _urgency(seq: Sequence) -> tuple[int, int, int]:
    return (seq.request.priority, *seq.age)
