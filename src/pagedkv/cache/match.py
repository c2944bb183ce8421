"""Match: how much of a prompt is cached, and what taking it would cost. Reading one changes nothing."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a prompt, as of now.

    num_tokens:         of the prompt
    num_cached_tokens:  of its prefix in the cache; 0 <= num_cached_tokens <= num_tokens - 1
    blocks:             the full blocks of that prefix
    source:             one more block that holds the rest of it, to be copied before it is written; None if there is
                        no rest, or if the pool could not spare the copy (``given_up``)
    num_idle:           of ``blocks`` and ``source``, those that only the cache holds: ``attach`` takes them out of
                        ``num_evictable``
    nearest:            encoded tokens of the cached block that shares most tokens with the rest
    twin:               a sequence that is about to compute the next block of this very prefix
    read:               False where the cache was not asked
    """

    num_tokens: int
    num_cached_tokens: int
    blocks: list[int]
    num_idle: int
    source: int | None = None
    nearest: bytes | None = None
    given_up: bool = False
    twin: Hashable | None = None
    read: bool = True

    @property
    def num_blocks(self) -> int:
        """Full blocks that ``attach`` would share: blocks that need not be reserved."""
        return len(self.blocks)

    @classmethod
    def nothing(cls, num_tokens: int) -> Match:
        """Of a prompt that may not read the cache."""
        return cls(num_tokens=num_tokens, num_cached_tokens=0, blocks=[], num_idle=0, read=False)
