"""KVCacheManager: which block holds which position of which sequence. Plain Python, no tensors.

Owns:    block tables, lengths, the allocator. Does not own: tokens, keys (PrefixCache), tensors (KVPool).
Rules:   0 <= lengths[seq] <= len(tables[seq]) * block_size. Positions below the length hold KV; the rest of the
         table is reserved and holds nothing yet.
         Only a block with one owner is written (I4): ``reserve`` copies the others first (copy-on-write).
         Every call either does all of what it says or raises and changes nothing (I8).
Cost:    O(1) per block touched. ``reserve`` for one more token of a sequence touches one block.

    table    [ b0 | b1 | b2 | b3 ]          positions 0 ...             length   length + new_tokens
              <-- full --><part><reserved>              ^ KV is written up to here
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

from pagedkv.cache.allocator import BlockAllocator
from pagedkv.errors import BlockStateError, InvalidRequest, SequenceExists, UnknownSequence


class BlockCopy(NamedTuple):
    """Copy all layers of block ``source`` to block ``destination``.

    The copies of a plan are carried out in the order in which ``reserve`` gave them, before anything of that plan is
    written. So a source that is freed later in the same plan, and even handed out again, is read in time.
    """

    source: int
    destination: int


class SequenceFollower(Protocol):
    """Hears what becomes of sequences. PrefixCache is the one follower of a manager."""

    def forked(self, parent: Hashable, child: Hashable) -> None: ...

    def truncated(self, seq: Hashable, length: int) -> None: ...

    def freed(self, seq: Hashable) -> None: ...

    def check(self) -> None: ...


class KVCacheManager:
    """Block tables over a pool of ``num_blocks`` blocks of ``block_size`` tokens.

    tables:   dict, sequence id -> list of block ids      lengths: dict, sequence id -> tokens whose KV is written
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise InvalidRequest(f"block_size is {block_size}; at least 1 is needed", field="block_size")
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.tables: dict[Hashable, list[int]] = {}
        self.lengths: dict[Hashable, int] = {}
        self.follower: SequenceFollower | None = None

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free ones and those that ``PrefixCache.evict`` can free."""
        return self.allocator.num_free + self.allocator.num_evictable

    def blocks_needed(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens: the ceiling of tokens / block_size."""
        return -(-tokens // self.block_size)

    def create(self, seq: Hashable) -> None:
        """An empty sequence. SequenceExists (a ValueError) if the id is in use."""
        self._must_be_new(seq)
        self.tables[seq] = []
        self.lengths[seq] = 0

    def adopt(self, seq: Hashable, blocks: list[int], length: int) -> None:
        """A sequence whose first ``length`` tokens lie in ``blocks``, which others hold already."""
        self._must_be_new(seq)
        self.allocator.share_many(blocks)
        self.tables[seq] = list(blocks)
        self.lengths[seq] = length

    def length(self, seq: Hashable) -> int:
        """Tokens of ``seq`` whose KV is written. UnknownSequence (a KeyError) for an id that is not in use."""
        self._table(seq)
        return self.lengths[seq]

    def blocks_to_reserve(self, seq: Hashable, new_tokens: int) -> int:
        """Fresh blocks that ``reserve(seq, new_tokens)`` would take now, those for copies included."""
        shared, missing = self._plan(seq, new_tokens)
        return len(shared) + missing

    def reserve(self, seq: Hashable, new_tokens: int) -> list[BlockCopy]:
        """Makes positions ``[length, length + new_tokens)`` writable.

        Adds the blocks that are missing, and replaces every block in that range that has other owners by a fresh
        one. Returns the copies to carry out before anything is written: one for each replaced block that holds
        earlier positions of this sequence. Raises OutOfBlocks (a MemoryError) and changes nothing where the free
        list is too short; it never evicts.
        """
        shared, missing = self._plan(seq, new_tokens)
        if not shared and not missing:
            return []
        table, length = self.tables[seq], self.lengths[seq]
        fresh = self.allocator.allocate_many(len(shared) + missing)
        copies = []
        for index, block in zip(shared, fresh, strict=False):
            source, table[index] = table[index], block
            if index * self.block_size < length:
                copies.append(BlockCopy(source, block))
            self.allocator.release(source)
        table += fresh[len(shared) :]
        return copies

    def advance(self, seq: Hashable, num_tokens: int) -> None:
        """The KV of ``num_tokens`` more positions is written."""
        table, length = self._table(seq), self.lengths[seq]
        room = len(table) * self.block_size - length
        if not 0 <= num_tokens <= room:
            raise InvalidRequest(f"cannot advance {seq!r} by {num_tokens}: {room} reserved", field="num_tokens")
        self.lengths[seq] = length + num_tokens

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """``child`` starts as an alias of ``parent``: counts go up, no data moves.

        Room that the parent had reserved and not written is shared as well, so whoever of the two writes next
        reserves again first.
        """
        table = self._table(parent)
        self._must_be_new(child)
        self.allocator.share_many(table)
        self.tables[child] = table.copy()
        self.lengths[child] = self.lengths[parent]
        if self.follower is not None:
            self.follower.forked(parent, child)

    def truncate(self, seq: Hashable, length: int) -> None:
        """Rolls back to ``length`` tokens and gives up the blocks beyond, last first."""
        table = self._table(seq)
        if not 0 <= length <= self.lengths[seq]:
            raise InvalidRequest(
                f"cannot truncate {seq!r} to {length}: it has {self.lengths[seq]} tokens", field="length"
            )
        keep = self.blocks_needed(length)
        self.allocator.release_many(table[keep:][::-1])
        del table[keep:]
        self.lengths[seq] = length
        if self.follower is not None:
            self.follower.truncated(seq, length)

    def free(self, seq: Hashable) -> None:
        """Ends a sequence and gives up its blocks, last first, so that the head of a prefix lives longest."""
        self.allocator.release_many(self._table(seq)[::-1])
        del self.tables[seq], self.lengths[seq]
        if self.follower is not None:
            self.follower.freed(seq)

    def check(self) -> None:
        """Verifies I1, I2, I3 and, with a prefix cache, I6. Raises BlockStateError; O(pool + tables), for tests."""
        allocator = self.allocator
        expected = [int(flag) for flag in allocator.cached]
        for seq, table in self.tables.items():
            if not 0 <= self.lengths[seq] <= len(table) * self.block_size:
                raise BlockStateError(f"{seq!r} has {self.lengths[seq]} tokens in {len(table)} blocks")
            for block in table:
                expected[block] += 1
        for block, (count, refs) in enumerate(zip(expected, allocator.refs, strict=True)):
            if count != refs:
                raise BlockStateError(f"block {block} has {refs} references and {count} owners")
        free = allocator.free_blocks()
        if len(free) != allocator.num_free or sorted(free) != [b for b, n in enumerate(expected) if n == 0]:
            raise BlockStateError(f"the free list {sorted(free)} is not the set of blocks without an owner")
        if self.follower is not None:
            self.follower.check()

    def _plan(self, seq: Hashable, new_tokens: int) -> tuple[list[int], int]:
        """(indices of shared blocks in the range to be written, number of blocks missing)."""
        table = self._table(seq)
        if new_tokens < 0:
            raise InvalidRequest(f"new_tokens is {new_tokens}; it cannot be negative", field="new_tokens")
        if new_tokens == 0:
            return [], 0
        length, refs = self.lengths[seq], self.allocator.refs
        first, end = length // self.block_size, self.blocks_needed(length + new_tokens)
        shared = [index for index in range(first, min(end, len(table))) if refs[table[index]] > 1]
        return shared, max(0, end - len(table))

    def _table(self, seq: Hashable) -> list[int]:
        try:
            return self.tables[seq]
        except KeyError:
            raise UnknownSequence(f"no sequence {seq!r}: never created, or freed already") from None

    def _must_be_new(self, seq: Hashable) -> None:
        if seq in self.tables:
            raise SequenceExists(f"sequence {seq!r} exists already")
