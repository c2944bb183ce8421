from __future__ import annotations

import pytest

from pagedkv.cache.keys import KeyScope, MediaSpan
from pagedkv.cache.manager import BlockCopy, KVCacheManager
from pagedkv.cache.prefix import PrefixCache
from pagedkv.errors import BlockStateError, InvalidRequest, SequenceExists


def make(num_blocks: int = 64, block_size: int = 4) -> tuple[KVCacheManager, PrefixCache]:
    manager = KVCacheManager(num_blocks, block_size)
    return manager, PrefixCache(manager)


def compute(cache: PrefixCache, seq: object, tokens: list[int]) -> list[BlockCopy]:
    """Writes the rest of ``tokens`` and publishes what is full."""
    manager = cache._manager
    new = len(tokens) - manager.lengths[seq]
    cache.evict(manager.blocks_to_reserve(seq, new))
    copies = manager.reserve(seq, new)
    manager.advance(seq, new)
    cache.remember(seq, tokens)
    manager.check()
    return copies


def serve(cache: PrefixCache, seq: object, tokens: list[int], **attach: object) -> int:
    """The whole life of a request; returns the tokens reused."""
    cached = cache.attach(seq, tokens, **attach)  # type: ignore[arg-type]
    compute(cache, seq, tokens)
    cache._manager.free(seq)
    cache._manager.check()
    return cached


def test_eight_requests_share_a_system_prompt() -> None:
    manager, cache = make(block_size=16)
    system = list(range(1000, 1096))
    computed = []
    for i in range(8):
        prompt = system + [i * 10 + j for j in range(8)]
        computed.append(len(prompt) - cache.attach(i, prompt))
        compute(cache, i, prompt)
    assert computed == [104] + [8] * 7
    in_use = {block for table in manager.tables.values() for block in table}
    assert len(in_use) == 14
    assert (cache.stats.queries, cache.stats.hits) == (832, 7 * 96)


@pytest.mark.parametrize("length", range(1, 26))
def test_b19_whole_prompt_cached_at_any_length(length: int) -> None:
    _, cache = make(block_size=8)
    prompt = list(range(length))
    assert serve(cache, "first", prompt) == 0
    in_full_blocks = length // 8 * 8
    assert serve(cache, "again", prompt) == min(length - 1, in_full_blocks)
    if length > 1:
        assert serve(cache, "shorter", prompt[:-1]) == min(length - 2, in_full_blocks)
    assert serve(cache, "longer", [*prompt, 99]) == in_full_blocks
    if length % 8 == 0:  # an exact multiple computes one token, not a block and not nothing
        assert cache.match(prompt).num_cached_tokens == length - 1


def test_a_partial_hit_is_copied_on_the_first_write() -> None:
    manager, cache = make()
    serve(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.attach("b", [1, 2, 3, 4, 5, 6, 9, 9, 9]) == 6
    source = manager.tables["b"][1]
    copies = compute(cache, "b", [1, 2, 3, 4, 5, 6, 9, 9, 9])
    assert copies == [BlockCopy(source, manager.tables["b"][1])]
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 0]).num_cached_tokens == 8  # the source is untouched
    assert cache.match([1, 2, 3, 4, 5, 6, 9, 9, 0]).num_cached_tokens == 8  # and the copy is published


def test_the_best_of_many_continuations_is_taken() -> None:
    _, cache = make(num_blocks=256)
    head = [7, 7, 7, 7]
    for i in range(100):
        serve(cache, i, [*head, i // 10, i % 10, 5, 5])
    assert cache.match([*head, 4, 2, 5, 9]).num_cached_tokens == 7
    assert cache.match([*head, 4, 77, 5, 9]).num_cached_tokens == 5
    assert cache.match([*head, 77, 1, 1, 1]).num_cached_tokens == 4


@pytest.mark.parametrize("length", [7, 8, 9, 11, 12, 13])
def test_a_warm_request_never_needs_more_blocks_than_a_cold_one(length: int) -> None:
    needed = -(-length // 4)
    manager, cache = make(num_blocks=needed)  # exactly the prompt's blocks
    prompt = list(range(length))
    assert serve(cache, 0, prompt) == 0
    for again in range(1, 4):
        match = cache.match(prompt)
        cached = cache.attach(again, prompt)
        assert cached == match.num_cached_tokens
        assert cached == ((length - 1) // 4 * 4)  # the copy cannot be had: the partial hit is given up
        assert match.given_up == (length % 4 == 0)
        compute(cache, again, prompt)
        manager.free(again)
    assert manager.num_available == needed


def test_a_partial_hit_is_kept_where_its_source_is_in_use_anyway() -> None:
    manager, cache = make(num_blocks=3)
    prompt = list(range(8))
    cache.attach("a", prompt)
    compute(cache, "a", prompt)
    assert cache.attach("b", prompt) == 7
    assert manager.blocks_to_reserve("b", 1) == 1
    compute(cache, "b", prompt)
    manager.check()


def test_one_block_per_key() -> None:
    manager, cache = make()
    prompt = list(range(9))
    for seq in ("a", "b"):  # both began before either was published
        cache.attach(seq, prompt)
    for seq in ("a", "b"):
        compute(cache, seq, prompt)
    assert manager.tables["a"][:2] == manager.tables["b"][:2]
    assert manager.tables["a"][2] != manager.tables["b"][2]
    assert cache.num_cached == 2
    assert manager.allocator.num_free == 64 - 4


def test_eviction_is_least_recently_used_and_leaves_before_parents() -> None:
    manager, cache = make(num_blocks=6)
    serve(cache, "old", [1, 1, 1, 1, 2, 2, 2, 2])
    serve(cache, "new", [3, 3, 3, 3, 4, 4, 4, 4])
    assert cache.evict(3) == 1
    assert cache.match([1, 1, 1, 1, 2, 2, 2, 2, 0]).num_cached_tokens == 4  # the leaf of the old one went
    assert cache.evict(4) == 1
    assert cache.match([1, 1, 1, 1, 0]).num_cached_tokens == 0
    assert cache.match([3, 3, 3, 3, 4, 4, 4, 4, 0]).num_cached_tokens == 8
    assert cache.evict(0) == 0
    assert cache.evict(100) == 2
    assert (manager.allocator.num_free, cache.num_evictable, cache.num_cached) == (6, 0, 0)


def test_use_renews_and_match_does_not() -> None:
    _, cache = make(num_blocks=6)
    old, new = [1, 1, 1, 1, 0], [2, 2, 2, 2, 0]
    serve(cache, "old", old)
    serve(cache, "new", new)
    cache.match(old)
    cache.evict(5)
    assert cache.match(old).num_cached_tokens == 0
    serve(cache, "old", old)
    serve(cache, "new", new)
    cache.evict(5)
    assert (cache.match(old).num_cached_tokens, cache.match(new).num_cached_tokens) == (0, 4)


def test_nothing_in_use_is_evicted() -> None:
    manager, cache = make(num_blocks=4)
    prompt = list(range(12))
    cache.attach("a", prompt)
    compute(cache, "a", prompt)
    assert cache.num_evictable == 0
    assert cache.evict(4) == 0
    assert cache.match(prompt).num_blocks == 2
    manager.free("a")
    assert cache.num_evictable == 3


def test_remember_continues_where_it_stopped_and_reads_no_token_twice() -> None:
    class Watched(list[int]):
        seen = 0

        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            if isinstance(index, slice):
                Watched.seen += len(range(*index.indices(len(self))))
            return super().__getitem__(index)  # type: ignore[index]

    manager, cache = make()
    tokens = Watched(range(8))
    manager.create("a")
    compute(cache, "a", tokens)
    for i in range(100):
        tokens.append(i)
        compute(cache, "a", tokens)
    assert cache.num_cached == 27
    assert Watched.seen <= 108


def test_b22_only_what_was_computed_is_published() -> None:
    for computed in (0, 4, 14):
        manager, cache = make()
        prompt = list(range(40))
        cache.attach("a", prompt)
        manager.reserve("a", 40)  # room for all of it, KV for a part
        manager.advance("a", computed)
        cache.remember("a", prompt)
        manager.free("a")
        assert cache.match(prompt).num_blocks == computed // 4
        manager.check()


def test_remember_trusts_its_own_tokens_not_those_of_attach() -> None:
    manager, cache = make()
    cache.attach("a", [1, 2, 3, 4, 5, 6, 7, 8])
    compute(cache, "a", [1, 2, 3, 4, 9, 9, 9, 9])
    assert cache.match([1, 2, 3, 4, 9, 9, 9, 9, 0]).num_cached_tokens == 8
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 0]).num_cached_tokens == 4
    manager.check()


def test_a_callers_chain_serves_a_request_all_its_life() -> None:
    manager, cache = make()
    prompt = list(range(10))
    chain = cache.chain()
    chain.extend(prompt)
    assert cache.match(prompt, chain=chain).num_cached_tokens == 0
    cache.attach("a", prompt, chain=chain)
    compute(cache, "a", prompt)
    for token in (50, 51, 52):
        chain.extend([token])
        manager.reserve("a", 1)
        manager.advance("a", 1)
        cache.remember("a", chain)
    assert cache.num_cached == 3
    manager.fork("a", "b")
    other = chain.fork()
    for seq, its, last in (("a", chain, 1), ("b", other, 2)):
        its.extend([last, last, last])
        manager.reserve(seq, 3)
        manager.advance(seq, 3)
        cache.remember(seq, its)
    assert cache.match([*prompt, 50, 51, 52, 1, 1, 1, 0]).num_cached_tokens == 16
    assert cache.match([*prompt, 50, 51, 52, 2, 2, 2, 0]).num_cached_tokens == 16
    with pytest.raises(InvalidRequest, match="another block size, scope or media"):
        cache.attach("c", prompt, chain=chain, scope=KeyScope(salt="x"))
    foreign = cache.chain(KeyScope(salt="x"))
    foreign.extend(range(40))
    manager.reserve("a", 4)
    manager.advance("a", 4)
    with pytest.raises(InvalidRequest, match="another scope"):
        cache.remember("a", foreign)
    manager.check()


def test_scopes_never_share_and_fork_keeps_the_scope() -> None:
    manager, cache = make()
    prompt = list(range(9))
    a, b = KeyScope(salt="a"), KeyScope(salt="b")
    assert serve(cache, 1, prompt, scope=a) == 0
    assert serve(cache, 2, prompt, scope=b) == 0
    assert serve(cache, 3, prompt) == 0
    assert serve(cache, 4, prompt, scope=a) == 8
    cache.attach("parent", prompt, scope=a)
    compute(cache, "parent", prompt)
    manager.fork("parent", "child")
    compute(cache, "child", [*prompt, 1, 2, 3])
    assert cache.match([*prompt, 1, 2, 3, 4], scope=a).num_cached_tokens == 12
    assert cache.match([*prompt, 1, 2, 3, 4], scope=b).num_cached_tokens == 8


def test_a_sequence_made_by_create_has_the_caches_own_scope() -> None:
    manager = KVCacheManager(16, 4)
    own = KeyScope(model="m")
    cache = PrefixCache(manager, own)
    manager.create("a")
    compute(cache, "a", list(range(8)))
    assert cache.match(list(range(9)), scope=own).num_cached_tokens == 8
    assert cache.match(list(range(9)), scope=KeyScope()).num_cached_tokens == 0


def test_b15_media_end_a_hit_before_their_placeholder() -> None:
    _, cache = make()
    tokens = [1, 2, 3, 4, 5, 0, 0, 6, 7, 8, 9, 10, 11]
    x, y = MediaSpan(5, 2, "image", b"x"), MediaSpan(5, 2, "image", b"y")
    assert serve(cache, 0, tokens, media=[x]) == 0
    assert serve(cache, 1, tokens, media=[x]) == 12
    assert cache.match(tokens, media=[y]).num_cached_tokens == 5  # the text before the picture, by a partial hit
    assert cache.match(tokens).num_cached_tokens == 5
    assert cache.match(tokens, media=[MediaSpan(6, 1, "image", b"x")]).num_cached_tokens == 5
    assert serve(cache, 2, tokens, media=[y]) == 5
    assert serve(cache, 3, tokens, media=[y]) == serve(cache, 4, tokens, media=[x]) == 12
    assert cache.match(tokens[:8], media=[x]).num_cached_tokens == 7  # last token rule, through the picture


def test_clear_drops_every_key_at_once() -> None:
    manager, cache = make()
    serve(cache, "gone", [9] * 8)
    prompt = list(range(8))
    cache.attach("a", prompt)
    compute(cache, "a", prompt)
    manager.create("made by create")
    assert cache.clear() == 2  # those that "a" still uses
    manager.check()
    assert (cache.num_cached, cache.num_evictable) == (0, 0)
    assert manager.allocator.num_free == 62
    assert cache.match(prompt).num_cached_tokens == 0
    manager.fork("a", "b")
    for seq in ("a", "b", "made by create"):
        compute(cache, seq, list(range(16)))
    assert cache.num_cached == 0  # sequences from before publish nothing more
    for seq in ("a", "b", "made by create"):
        manager.free(seq)
    assert manager.allocator.num_free == 64
    assert serve(cache, "new", prompt) == 0
    assert serve(cache, "newer", prompt) == 7


def test_b26_statistics_count_a_request_once() -> None:
    manager, cache = make()
    prompt = list(range(20))
    cache.attach("a", prompt)
    for start in range(0, 20, 5):  # its own chunks are no hits
        manager.reserve("a", 5)
        manager.advance("a", 5)
        cache.remember("a", prompt[: start + 5])
    assert (cache.stats.queries, cache.stats.hits) == (20, 0)
    manager.free("a")
    assert cache.attach("a", prompt, count=False) == 19  # preempted, and back again
    manager.free("a")
    assert cache.attach("b", prompt, read=False) == 0  # may not read: neither a hit nor a miss
    assert (cache.stats.queries, cache.stats.hits) == (20, 0)
    cache.attach("c", prompt)
    assert (cache.stats.queries, cache.stats.hits, cache.stats.hit_rate) == (40, 19, 19 / 40)


def test_reading_nothing_still_publishes() -> None:
    manager, cache = make()
    prompt = list(range(8))
    serve(cache, "a", prompt)
    assert serve(cache, "b", prompt, read=False) == 0
    assert cache.num_cached == 2
    assert serve(cache, "c", [5] * 8, read=False) == 0
    assert cache.match([5] * 9).num_cached_tokens == 8
    manager.check()


def test_misuse_changes_nothing() -> None:
    manager, cache = make()
    cache.attach("a", [1, 2, 3])
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        cache.attach("b", [])
    with pytest.raises(SequenceExists):
        cache.attach("a", [1, 2, 3])
    with pytest.raises(KeyError, match="no sequence 'x'"):
        cache.remember("x", [1])
    with pytest.raises(BlockStateError, match="a prefix cache already"):
        PrefixCache(manager)
    assert list(manager.tables) == ["a"]
    manager.check()


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    manager, cache = make()
    chat = list(range(10))
    cache.attach("turn 1", chat)
    compute(cache, "turn 1", chat)
    for token in range(100, 107):
        chat.append(token)
        compute(cache, "turn 1", chat)
    manager.free("turn 1")
    assert cache.match([*chat, 1, 2, 3]).num_cached_tokens == 16
