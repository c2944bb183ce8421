from __future__ import annotations

import pytest

from pagedkv.cache.manager import BlockCopy, KVCacheManager
from pagedkv.errors import BlockStateError, InvalidRequest, OutOfBlocks, SequenceExists, UnknownSequence


def written(manager: KVCacheManager, seq: object, num_tokens: int) -> list[BlockCopy]:
    copies = manager.reserve(seq, num_tokens)
    manager.advance(seq, num_tokens)
    return copies


def state(manager: KVCacheManager) -> tuple[object, ...]:
    tables = {seq: table.copy() for seq, table in manager.tables.items()}
    return tables, manager.lengths.copy(), manager.allocator.refs.copy(), manager.allocator.free_blocks()


def test_blocks_needed_is_a_ceiling() -> None:
    manager = KVCacheManager(4, 16)
    assert [manager.blocks_needed(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_reserve_adds_only_what_is_missing() -> None:
    manager = KVCacheManager(8, 4)
    manager.create("a")
    assert manager.blocks_to_reserve("a", 5) == 2
    assert written(manager, "a", 5) == []
    table = manager.tables["a"].copy()
    assert manager.blocks_to_reserve("a", 3) == 0
    assert written(manager, "a", 3) == []
    assert manager.tables["a"] == table
    assert manager.blocks_to_reserve("a", 1) == 1
    assert manager.reserve("a", 0) == []
    manager.check()


def test_reserve_is_all_or_nothing() -> None:
    manager = KVCacheManager(4, 4)
    manager.create("a")
    written(manager, "a", 6)
    manager.fork("a", "b")
    before = state(manager)
    with pytest.raises(OutOfBlocks) as caught:
        manager.reserve("b", 7)  # a copy of the shared block and two more
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (3, 2, 0)
    assert state(manager) == before
    manager.check()


def test_forty_tokens_forked_four_times_need_four_blocks() -> None:
    manager = KVCacheManager(16, 16)
    manager.create("parent")
    written(manager, "parent", 40)
    for child in range(4):
        manager.fork("parent", child)
    assert manager.allocator.num_free == 13
    copies = [written(manager, child, 1) for child in range(4)]
    assert manager.allocator.num_free == 9
    assert all(len(made) == 1 for made in copies)
    assert {made[0].source for made in copies} == {manager.tables["parent"][2]}
    assert written(manager, "parent", 1) == []  # the last owner writes in place
    manager.check()


def test_truncate_into_a_shared_block_then_append_copies_it() -> None:
    manager = KVCacheManager(8, 4)
    manager.create("a")
    written(manager, "a", 8)
    manager.fork("a", "b")
    manager.truncate("b", 6)
    shared = manager.tables["a"][1]
    assert manager.tables["b"] == manager.tables["a"]
    copies = written(manager, "b", 1)
    assert copies == [BlockCopy(shared, manager.tables["b"][1])]
    assert manager.tables["a"][1] == shared
    manager.check()


def test_truncate_returns_blocks_beyond_the_length() -> None:
    manager = KVCacheManager(8, 4)
    manager.create("a")
    written(manager, "a", 13)
    manager.truncate("a", 8)
    assert (len(manager.tables["a"]), manager.allocator.num_free) == (2, 6)
    manager.truncate("a", 0)
    assert (manager.tables["a"], manager.allocator.num_free) == ([], 8)
    manager.check()


def test_room_shared_by_a_fork_is_replaced_without_a_copy() -> None:
    manager = KVCacheManager(8, 4)
    manager.create("a")
    written(manager, "a", 4)
    manager.reserve("a", 3)
    manager.fork("a", "b")
    assert manager.reserve("a", 3) == []  # the second block is replaced; it held nothing
    assert manager.tables["a"][0] == manager.tables["b"][0]
    assert manager.tables["a"][1] != manager.tables["b"][1]
    manager.check()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.create("a"), SequenceExists, "'a' exists"),
        (lambda m: m.fork("a", "b"), SequenceExists, "'b' exists"),
        (lambda m: m.fork("a", "a"), SequenceExists, "'a' exists"),
        (lambda m: m.fork("x", "y"), UnknownSequence, "no sequence 'x'"),
        (lambda m: m.free("x"), UnknownSequence, "no sequence 'x'"),
        (lambda m: m.reserve("x", 1), UnknownSequence, "no sequence 'x'"),
        (lambda m: m.truncate("x", 0), UnknownSequence, "no sequence 'x'"),
        (lambda m: m.advance("x", 0), UnknownSequence, "no sequence 'x'"),
        (lambda m: m.length("x"), UnknownSequence, "no sequence 'x'"),
        (lambda m: m.truncate("a", 6), InvalidRequest, "cannot truncate 'a' to 6: it has 5 tokens"),
        (lambda m: m.truncate("a", -1), InvalidRequest, "cannot truncate 'a' to -1"),
        (lambda m: m.advance("a", 4), InvalidRequest, "cannot advance 'a' by 4: 3 reserved"),
        (lambda m: m.advance("a", -1), InvalidRequest, "cannot advance 'a' by -1"),
        (lambda m: m.reserve("a", -1), InvalidRequest, "new_tokens is -1"),
    ],
)
def test_misuse_is_a_clear_error_and_changes_nothing(call: object, error: type[Exception], message: str) -> None:
    manager = KVCacheManager(8, 4)
    manager.create("a")
    written(manager, "a", 5)
    manager.fork("a", "b")
    before = state(manager)
    with pytest.raises(error, match=message):
        call(manager)  # type: ignore[operator]
    assert state(manager) == before
    manager.check()


def test_freeing_twice_is_an_error() -> None:
    manager = KVCacheManager(8, 4)
    manager.create("a")
    written(manager, "a", 5)
    manager.free("a")
    with pytest.raises(KeyError, match="freed already"):
        manager.free("a")
    assert manager.allocator.num_free == 8


def test_tables_and_lengths_are_plain_and_check_sees_through_them() -> None:
    manager = KVCacheManager(8, 4)
    manager.create("a")
    written(manager, "a", 5)
    manager.lengths["a"] = 9
    with pytest.raises(BlockStateError, match="9 tokens in 2 blocks"):
        manager.check()
    manager.lengths["a"] = 5
    manager.tables["b"], manager.lengths["b"] = [manager.tables["a"][0]], 0
    with pytest.raises(BlockStateError, match="1 references and 2 owners"):
        manager.check()


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_without_tokens_is_refused(block_size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"block_size is {block_size}"):
        KVCacheManager(4, block_size)
