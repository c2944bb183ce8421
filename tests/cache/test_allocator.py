from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagedkv.cache.allocator import BlockAllocator
from pagedkv.errors import BlockStateError, InvalidRequest, OutOfBlocks


class Listener:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def idle(self, block: int) -> None:
        self.heard.append(("idle", block))

    def busy(self, block: int) -> None:
        self.heard.append(("busy", block))

    def idle_many(self, blocks: Sequence[int]) -> None:
        self.heard += [("idle", block) for block in blocks]

    def busy_many(self, blocks: Sequence[int]) -> None:
        self.heard += [("busy", block) for block in blocks]

    def __len__(self) -> int:
        return 0


def state(allocator: BlockAllocator) -> tuple[object, ...]:
    return allocator.refs.copy(), bytes(allocator.cached), allocator.free_blocks(), allocator.num_free


def test_every_block_is_handed_out_once() -> None:
    allocator = BlockAllocator(5)
    blocks = [allocator.allocate(), *allocator.allocate_many(4)]
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert allocator.num_free == 0
    assert allocator.refs == [1] * 5


def test_exhaustion_is_a_memory_error_with_numbers() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate()
    before = state(allocator)
    with pytest.raises(MemoryError) as caught:
        allocator.allocate_many(3)
    assert isinstance(caught.value, OutOfBlocks)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (3, 2, 0)
    assert state(allocator) == before


def test_a_freed_block_comes_back_before_an_untouched_one() -> None:
    allocator = BlockAllocator(10)
    first = allocator.allocate_many(3)
    allocator.release(first[1])
    assert allocator.allocate() == first[1]
    allocator.release_many(first)
    assert sorted(allocator.allocate_many(4)) == [0, 1, 2, 3]


def test_a_block_is_free_when_its_last_owner_leaves() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.share(block)
    allocator.release(block)
    assert allocator.num_free == 1
    allocator.release(block)
    assert allocator.num_free == 2
    with pytest.raises(RuntimeError, match=f"cannot release block {block}: it is free"):
        allocator.release(block)


@pytest.mark.parametrize("block", [-1, 4, 100])
@pytest.mark.parametrize("call", ["share", "release", "cache", "uncache"])
def test_an_unknown_block_is_an_error(call: str, block: int) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate_many(4)
    before = state(allocator)
    with pytest.raises(BlockStateError, match="does not exist; the pool has blocks 0 to 3"):
        getattr(allocator, call)(block)
    assert state(allocator) == before


def test_sharing_a_free_block_changes_nothing() -> None:
    allocator = BlockAllocator(3)
    held = allocator.allocate_many(2)
    before = state(allocator)
    with pytest.raises(BlockStateError, match="it is free"):
        allocator.share_many([*held, 2])
    assert state(allocator) == before


def test_b02_a_bulk_release_with_a_block_named_twice() -> None:
    allocator = BlockAllocator(4)
    a, b = allocator.allocate_many(2)
    before = state(allocator)
    with pytest.raises(BlockStateError):
        allocator.release_many([b, a, a])
    assert state(allocator) == before
    allocator.share(a)
    allocator.release_many([a, a])  # two references, both given up
    allocator.release(b)
    assert allocator.num_free == 4
    assert sorted(allocator.allocate_many(4)) == [0, 1, 2, 3]


def test_the_listener_hears_of_cached_blocks_only() -> None:
    allocator, listener = BlockAllocator(3), Listener()
    allocator.listener = listener
    plain, cached = allocator.allocate_many(2)
    allocator.cache(cached)
    allocator.share_many([plain, cached])
    allocator.release_many([cached, plain, cached])
    assert listener.heard == [("idle", cached)]
    allocator.share(cached)
    allocator.release(cached)
    assert listener.heard == [("idle", cached), ("busy", cached), ("idle", cached)]
    with pytest.raises(BlockStateError, match="only the prefix cache holds it"):
        allocator.release(cached)
    assert allocator.uncache(cached)
    assert allocator.num_free == 2


def test_caching_twice_or_a_free_block_is_an_error() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.cache(block)
    before = state(allocator)
    for call, argument in ((allocator.cache, block), (allocator.cache, 1), (allocator.uncache, 1)):
        with pytest.raises(BlockStateError):
            call(argument)
    assert state(allocator) == before
    assert not allocator.uncache(block)  # somebody else still holds it


@pytest.mark.parametrize("num_blocks", [0, -3])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(InvalidRequest, match=f"num_blocks is {num_blocks}"):
        BlockAllocator(num_blocks)
