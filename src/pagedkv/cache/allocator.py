"""BlockAllocator: which blocks are free, and how many owners each of the others has.

Owns:    the free list and one reference count per block. Knows no sequence, no token, no tensor.
Rules:   refs[b] = number of block tables that hold b, plus 1 if the prefix cache holds it (I1).
         A block is free exactly when refs[b] == 0; freed blocks are handed out again before untouched ones,
         so memory that was never needed is never touched.
         Every call either does all of what it says or raises and changes nothing (I8).
Cost:    O(1) per block named in a call. Making an allocator of n blocks is one list of n zeros.
"""

from __future__ import annotations

from typing import Protocol

from pagedkv.cache.native import native
from pagedkv.errors import BlockStateError, InvalidRequest, OutOfBlocks


@native
def add_owner(refs: list[int], cached: bytearray, blocks: list[int]) -> tuple[int, list[int]]:
    """One more owner for each block, up to the first that is free or does not exist.

    Returns (blocks done, those of them that only the prefix cache held).
    """
    was_idle: list[int] = []
    for done, block in enumerate(blocks):
        if not 0 <= block < len(refs) or refs[block] == 0:
            return done, was_idle
        if refs[block] == 1 and cached[block]:
            was_idle.append(block)
        refs[block] += 1
    return len(blocks), was_idle


@native
def drop_owner(refs: list[int], cached: bytearray, blocks: list[int]) -> tuple[int, list[int], list[int]]:
    """One owner less for each block, up to the first without an owner other than the prefix cache.

    Returns (blocks done, those of them that nobody holds now, those that only the cache holds).
    """
    freed: list[int] = []
    idle: list[int] = []
    for done, block in enumerate(blocks):
        if not 0 <= block < len(refs) or refs[block] == cached[block]:
            return done, freed, idle
        refs[block] -= 1
        if refs[block] == 0:
            freed.append(block)
        elif refs[block] == 1 and cached[block]:
            idle.append(block)
    return len(blocks), freed, idle


@native
def add_cache(refs: list[int], cached: bytearray, blocks: list[int]) -> int:
    """The prefix cache becomes an owner of each block, up to the first that is cached, free or does not exist.

    Returns the blocks done.
    """
    for done, block in enumerate(blocks):
        if not 0 <= block < len(refs) or refs[block] == 0 or cached[block]:
            return done
        refs[block] += 1
        cached[block] = 1
    return len(blocks)


@native
def drop_cache(refs: list[int], cached: bytearray, blocks: list[int]) -> tuple[int, list[int]]:
    """The prefix cache gives up each block, up to the first that is not cached or does not exist.

    Returns (blocks done, those of them that nobody holds now).
    """
    freed: list[int] = []
    for done, block in enumerate(blocks):
        if not 0 <= block < len(refs) or not cached[block]:
            return done, freed
        refs[block] -= 1
        cached[block] = 0
        if refs[block] == 0:
            freed.append(block)
    return len(blocks), freed


class BlockListener(Protocol):
    """Hears when a cached block loses its last other owner, and when it gains one again."""

    def idle(self, block: int) -> None:
        """Only the cache holds ``block`` now."""

    def busy(self, block: int) -> None:
        """Somebody else holds ``block`` again."""

    def idle_many(self, blocks: list[int]) -> None:
        """``idle`` of each, in order."""

    def busy_many(self, blocks: list[int]) -> None:
        """``busy`` of each, in order."""

    def __len__(self) -> int:
        """Blocks that are idle now: each of them can be evicted."""


class BlockAllocator:
    """A free list and reference counts over blocks ``0 .. num_blocks - 1``.

    refs:      list of counts, indexed by block
    cached:    bytearray of flags, indexed by block: 1 where one of the references is the prefix cache's
    listener:  set by PrefixCache; None while nothing is cached
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidRequest(f"num_blocks is {num_blocks}; at least 1 block is needed", field="num_blocks")
        self.num_blocks = num_blocks
        self.refs: list[int] = [0] * num_blocks
        self.cached = bytearray(num_blocks)
        self.listener: BlockListener | None = None
        self._returned: list[int] = []  # freed blocks, the most recent last
        self._untouched = 0  # blocks from here on were never handed out

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out now."""
        return len(self._returned) + self.num_blocks - self._untouched

    @property
    def num_evictable(self) -> int:
        """Blocks that only the prefix cache holds."""
        return 0 if self.listener is None else len(self.listener)

    def allocate(self) -> int:
        """One block with a count of 1. Raises OutOfBlocks (a MemoryError) when none is free."""
        return self.allocate_many(1)[0]

    def allocate_many(self, n: int) -> list[int]:
        """``n`` blocks with a count of 1 each, or OutOfBlocks and none."""
        if n < 0:
            raise InvalidRequest(f"n is {n}; a number of blocks cannot be negative", field="n")
        returned = self._returned
        if n <= len(returned):
            cut = len(returned) - n
            blocks = returned[cut:]
            blocks.reverse()  # most recently freed first: its memory is the likeliest to be warm
            del returned[cut:]
        else:
            if n > self.num_free:
                raise OutOfBlocks(n, self.num_free, self.num_evictable)
            fresh = n - len(returned)
            blocks = returned[::-1]
            blocks.extend(range(self._untouched, self._untouched + fresh))
            returned.clear()
            self._untouched += fresh
        refs = self.refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more owner of a block that is not free."""
        self.share_many([block])

    def share_many(self, blocks: list[int]) -> None:
        """One more owner for each block. A free block or an unknown id raises BlockStateError, nothing changed."""
        done, busy = add_owner(self.refs, self.cached, blocks)
        if done < len(blocks):
            for block in blocks[:done]:
                self.refs[block] -= 1
            self._must_exist(blocks[done])
            raise BlockStateError(f"cannot share block {blocks[done]}: it is free")
        if busy and self.listener is not None:
            self.listener.busy_many(busy)

    def release(self, block: int) -> None:
        """One owner less; at zero the block is free. A free block raises BlockStateError (a RuntimeError)."""
        self.release_many([block])

    def release_many(self, blocks: list[int]) -> None:
        """One owner less for each block, in the order given; an id named twice loses two.

        Raises BlockStateError, with nothing changed, if any count would fall below zero, or if the reference
        that would go is the cache's own (that one leaves by ``uncache``).
        """
        done, freed, idle = drop_owner(self.refs, self.cached, blocks)
        if done < len(blocks):
            for block in blocks[:done]:
                self.refs[block] += 1
            self._must_exist(blocks[done])
            owner = "only the prefix cache holds it" if self.cached[blocks[done]] else "it is free"
            raise BlockStateError(f"cannot release block {blocks[done]}: {owner}")
        self._returned += freed
        if idle and self.listener is not None:
            self.listener.idle_many(idle)

    def cache_many(self, blocks: list[int]) -> None:
        """The prefix cache becomes one more owner of each block; all are in use and not cached."""
        done = add_cache(self.refs, self.cached, blocks)
        if done < len(blocks):
            drop_cache(self.refs, self.cached, blocks[:done])
            self._must_exist(blocks[done])
            state = "cached" if self.cached[blocks[done]] else "free"
            raise BlockStateError(f"cannot cache block {blocks[done]}: it is {state}")

    def uncache_many(self, blocks: list[int]) -> int:
        """The prefix cache gives up its references; returns how many blocks that freed. The listener is not told."""
        done, freed = drop_cache(self.refs, self.cached, blocks)
        if done < len(blocks):
            for block in blocks[:done]:
                self.refs[block] += 1
                self.cached[block] = 1
            self._must_exist(blocks[done])
            raise BlockStateError(f"cannot uncache block {blocks[done]}: it is not cached")
        self._returned += freed
        return len(freed)

    def cache(self, block: int) -> None:
        """``cache_many`` of one block."""
        self.cache_many([block])

    def uncache(self, block: int) -> bool:
        """``uncache_many`` of one block: whether that freed it."""
        return self.uncache_many([block]) == 1

    def free_blocks(self) -> list[int]:
        """The ids of all free blocks, for checks; O(num_blocks)."""
        return [*self._returned, *range(self._untouched, self.num_blocks)]

    def _must_exist(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise BlockStateError(f"block {block} does not exist; the pool has blocks 0 to {self.num_blocks - 1}")
