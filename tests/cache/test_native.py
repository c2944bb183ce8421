"""Each native loop against the Python function of its name: same results, same effects, on the same arguments."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.cache import eviction, index
from pagedkv.cache.native import IN_PYTHON, extension
from pagedkv.cache.prefix import KVCacheManager, PrefixCache

if extension is None:
    pytest.skip("the native extension is not built (PAGEDKV_NATIVE=0)", allow_module_level=True)

NUM_BLOCKS = 6
BLOCKS = st.lists(st.integers(-1, NUM_BLOCKS), max_size=8)


def agree(name: str, *arguments: Any) -> Any:
    """Runs both on copies of the arguments; results and what became of the arguments must be equal."""
    ours, theirs = copy.deepcopy(arguments), copy.deepcopy(arguments)
    outcomes = []
    for loop, given_to in ((getattr(extension, name), ours), (IN_PYTHON[name], theirs)):
        try:
            outcomes.append(loop(*given_to))
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
    assert ours == theirs
    return outcomes[0]


@pytest.mark.parametrize("name", ["add_owner", "drop_owner", "add_cache", "drop_cache"])
@given(
    owners=st.lists(st.integers(0, 3), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    flags=st.lists(st.integers(0, 1), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    blocks=BLOCKS,
)
@settings(deadline=None)
def test_counts(name: str, owners: list[int], flags: list[int], blocks: list[int]) -> None:
    refs = [count + flag for count, flag in zip(owners, flags, strict=True)]
    agree(name, refs, bytearray(flags), blocks)


def test_counts_beyond_small_numbers() -> None:
    assert agree("add_owner", [0, 10**9], bytearray(2), [1, 1, 1]) == (3, [])
    with pytest.raises(ValueError, match="one flag for each"):
        extension.add_owner([0, 0], bytearray(1), [0])
    with pytest.raises(TypeError):
        extension.add_owner([1, 1], bytearray(2), ["0"])


def a_tree() -> index.BlockIndex:
    """Sixty blocks in chains that fork, some with hits."""
    draw = random.Random(7)
    manager = KVCacheManager(64, 2)
    cache = PrefixCache(manager)
    for seq in range(30):
        prompt = [draw.randrange(3) for _ in range(9)]
        reused = cache.attach(seq, prompt)
        cache.evict(manager.blocks_to_reserve(seq, 9 - reused))
        manager.reserve(seq, 9 - reused)
        manager.advance(seq, 9 - reused)
        cache.remember(seq, prompt)
        manager.free(seq)
    return cache.index


@given(st.lists(st.integers(0, 2), min_size=2, max_size=9), st.integers(0, 5))
@settings(deadline=None)
def test_follow(prompt: list[int], most: int) -> None:
    tree = a_tree()
    cache = PrefixCache(KVCacheManager(1, 2))
    chain = cache.chain()
    chain.extend(prompt)
    root = tree.root(cache.scope)
    for chunks in (chain.chunks, chain.chunks[::-1], chain.chunks[:1]):
        if len(chunks) >= min(most, len(chain.keys)):
            agree("follow", tree.blocks, tree.parents, tree.tokens, chain.keys, chunks, root, most)


def test_link_blocks() -> None:
    keys, chunks = [bytes([i]) * 32 for i in range(5)], [bytes([i]) * 8 for i in range(5)]
    for blocks in ([3], [5, 1, 4], [2, 3, 0, 1, 5]):
        lists: tuple[list[Any], ...] = ([None] * 6, [b""] * 6, [0] * 6, [None] * 6)
        agree("link_blocks", *lists, blocks, keys[: len(blocks)], chunks[: len(blocks)], -7)


@given(st.permutations(range(64)), st.integers(0, 3))
@settings(deadline=None)
def test_unlink_blocks(blocks: list[int], start: int) -> None:
    tree = a_tree()
    plain_first = sorted(blocks, key=lambda block: bool(tree.children.children(block)))
    for order in (blocks, plain_first):
        child_of = [child if isinstance(child, int) else None for child in tree.children.of_block]
        agree("unlink_blocks", tree.blocks, tree.keys, tree.tokens, tree.parents, child_of, tree.hits, order, start, [])


def test_a_run_of_the_lru_queue() -> None:
    run, other = eviction._Run([], 0.0), eviction._Run([], 0.0)
    ours: dict[int, Any] = {9: other}
    theirs = dict(ours)
    steps: list[tuple[str, Callable[[dict[int, Any]], tuple[Any, ...]]]] = [
        ("stand_in", lambda run_of: (run_of, run, [1000, 2, 3])),
        ("step_out", lambda run_of: (run_of, [2])),
        ("still_in", lambda run_of: (run_of, run, [3, 2, 9, 1000])),
    ]
    for name, arguments in steps:
        assert getattr(extension, name)(*arguments(ours)) == IN_PYTHON[name](*arguments(theirs))
        assert ours == theirs
    with pytest.raises(KeyError):
        extension.step_out(ours, [2])


@given(st.lists(st.integers(-1, 2**32) | st.booleans() | st.just(2**70), max_size=20))
@settings(deadline=None)
def test_pack_tokens(tokens: list[int]) -> None:
    agree("pack_tokens", tokens)


class Seven:
    """An integer to whoever asks, as numpy's are."""

    def __index__(self) -> int:
        return 7


def test_pack_tokens_asks_for_an_integer() -> None:
    assert extension.pack_tokens([1, Seven()]) == IN_PYTHON["pack_tokens"]([1, Seven()]) == b"\1\0\0\0\7\0\0\0"


@pytest.mark.parametrize("odd", [1.0, "1", None])
def test_pack_tokens_leaves_what_is_no_integer(odd: object) -> None:
    assert agree("pack_tokens", [1, odd]) is None


def test_nothing_is_kept_alive() -> None:
    """A wrong count of references in the extension would show here as growth, or as a crash."""
    import gc
    import sys

    key, block = bytes(range(32)), 12345
    before = sys.getrefcount(key), sys.getrefcount(block)
    for _ in range(100):
        lists: tuple[list[Any], ...] = ([None] * 12346, [b""] * 12346, [0] * 12346, [None] * 12346)
        keys, tokens, parents, child_of = lists
        extension.link_blocks(keys, tokens, parents, child_of, [block, 1], [key, key], [key, key], block)
        child_of[block], child_of[1] = 1, None
        parents[1] = block
        assert extension.unlink_blocks({key: 1}, keys, tokens, parents, child_of, {}, [1], 0, []) == 1
        run_of = {block: key}
        extension.stand_in(run_of, key, [block])
        extension.still_in(run_of, key, [block])
        extension.step_out(run_of, [block])
        refs = [2] * 12346
        extension.add_owner(refs, bytearray(12346), [block])
        extension.drop_owner(refs, bytearray(12346), [block])
        extension.follow({key: block}, parents, [key] * 12346, [key], [key], 0, 1)
        del keys, tokens, parents, child_of, lists, run_of, refs
    gc.collect()
    assert (sys.getrefcount(key), sys.getrefcount(block)) == before
