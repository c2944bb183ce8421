"""Fault cases of kinds 1 and 2 from the field, as far as the cache alone can show them."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest
from python_loops import loops_in_python

from pagedkv.cache.keys import KeyScope
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.prefix import PrefixCache
from pagedkv.cache.slots import physical_slot
from pagedkv.errors import OutOfBlocks, UnknownSequence


class Bench:
    """A cache and, for each slot, the text whose KV it holds."""

    def __init__(self, num_blocks: int, block_size: int = 4) -> None:
        self.manager = KVCacheManager(num_blocks, block_size)
        self.cache = PrefixCache(self.manager)
        self.slots: dict[int, list[object]] = {b: [None] * block_size for b in range(num_blocks)}
        self.texts: dict[Hashable, list[int]] = {}

    def attach(self, seq: Hashable, prompt: list[int]) -> int:
        cached = self.cache.attach(seq, prompt)
        self.texts[seq] = prompt[:cached]
        return cached

    def write(self, seq: Hashable, tokens: list[int]) -> None:
        """Reserves (evicting if need be), copies, writes, advances."""
        self.cache.evict(self.manager.blocks_to_reserve(seq, len(tokens)))
        for source, destination in self.manager.reserve(seq, len(tokens)):
            self.slots[destination] = self.slots[source].copy()
        for token in tokens:
            position = len(self.texts[seq])
            self.texts[seq].append(token)
            block, offset = physical_slot(self.manager.tables[seq], position, self.manager.block_size)
            self.slots[block][offset] = tuple(self.texts[seq])
        self.manager.advance(seq, len(tokens))

    def serve(self, seq: Hashable, prompt: list[int]) -> int:
        cached = self.attach(seq, prompt)
        self.write(seq, prompt[cached:])
        self.cache.remember(seq, prompt)
        self.verify()
        return cached

    def free(self, seq: Hashable) -> None:
        self.manager.free(seq)
        del self.texts[seq]
        self.verify()

    def fork(self, parent: Hashable, child: Hashable) -> None:
        self.manager.fork(parent, child)
        self.texts[child] = self.texts[parent].copy()

    def truncate(self, seq: Hashable, length: int) -> None:
        self.manager.truncate(seq, length)
        del self.texts[seq][length:]

    def verify(self) -> None:
        """The accounts agree, and each sequence reads its own text."""
        self.manager.check()
        for seq, text in self.texts.items():
            for position in range(len(text)):
                block, offset = physical_slot(self.manager.tables[seq], position, self.manager.block_size)
                assert self.slots[block][offset] == tuple(text[: position + 1])

    def balanced(self) -> None:
        """After all work: every block is free or cached and unused."""
        assert self.manager.tables == {}
        assert self.manager.num_available == self.manager.allocator.num_blocks
        assert set(self.manager.allocator.refs) <= {0, 1}


def test_b01_forks_that_append_and_roll_back_free_each_block_once() -> None:
    bench = Bench(64)
    bench.attach("parent", list(range(13)))
    bench.write("parent", list(range(13)))
    for child in "abc":
        bench.fork("parent", child)
    for i, child in enumerate("abc"):
        bench.write(child, [100 * i + j for j in range(6)])
    bench.truncate("b", 9)
    bench.write("b", [7, 8, 9])
    for seq in ("b", "parent", "c", "a"):
        bench.verify()
        bench.free(seq)
    assert bench.manager.allocator.num_free == 64
    assert bench.manager.allocator.refs == [0] * 64


@pytest.mark.parametrize("prompt_length", [3, 4, 5])
@pytest.mark.parametrize("generated", [1, 2, 3, 4, 5])
def test_b04_the_last_slot_is_given_back_once(prompt_length: int, generated: int) -> None:
    bench = Bench(8)
    prompt = list(range(prompt_length))
    bench.serve("a", prompt)
    for token in range(100, 100 + generated - 1):  # the last token generated is never fed back
        bench.write("a", [token])
        bench.cache.remember("a", bench.texts["a"])
    kept = len(bench.texts["a"]) // 4
    bench.free("a")
    bench.balanced()
    assert bench.cache.num_cached == kept


def test_b05_counters_equal_a_recount_over_5000_operations() -> None:
    rng = random.Random(5)
    bench = Bench(16)
    prefixes = [[i] * rng.randrange(3, 12) for i in range(3)]
    for step in range(5000):
        live = list(bench.texts)
        try:
            action = rng.choice(("serve", "serve", "write", "fork", "truncate", "free", "free", "evict", "clear"))
            if action == "serve":
                bench.serve(step, [*rng.choice(prefixes), *[rng.randrange(3) for _ in range(rng.randrange(1, 9))]])
            elif action == "evict":
                bench.cache.evict(rng.randrange(17))
            elif action == "clear" and step % 50 == 0:
                bench.cache.clear()
            elif live:
                seq = rng.choice(live)
                if action == "write":
                    bench.write(seq, [rng.randrange(3)])
                    bench.cache.remember(seq, bench.texts[seq])
                elif action == "fork":
                    bench.fork(seq, step)
                elif action == "truncate":
                    bench.truncate(seq, rng.randrange(len(bench.texts[seq]) + 1))
                elif action == "free":
                    bench.free(seq)
        except OutOfBlocks:
            bench.free(rng.choice(list(bench.texts)))
        bench.verify()
    for seq in list(bench.texts):
        bench.free(seq)
    bench.balanced()


def test_b07_ending_a_sequence_that_is_not_there_is_harmless() -> None:
    bench = Bench(8)
    bench.attach("queued", [1, 2, 3])  # has no blocks yet
    bench.free("queued")
    bench.serve("running", [1, 2, 3, 4, 5])
    bench.free("running")
    for seq in ("queued", "running", "never there"):
        with pytest.raises(UnknownSequence):
            bench.manager.free(seq)
    bench.balanced()


def test_b08_a_reserve_that_fails_after_attach_leaks_nothing() -> None:
    bench = Bench(10)
    text = list(range(24))
    bench.serve("a", text)
    before = bench.manager.allocator.refs.copy()
    for _ in range(100):
        assert bench.attach("b", [*text[:16], *range(100, 132)]) == 16
        with pytest.raises(OutOfBlocks):
            bench.write("b", list(range(100, 132)))
        bench.free("b")
        assert bench.manager.allocator.refs == before
    bench.free("a")
    bench.serve("large", list(range(200, 240)))
    assert len(bench.manager.tables["large"]) == 10


def serve_in(bench: Bench, prompt: list[int], scope: KeyScope) -> int:
    """The whole life of a request in a scope; returns the tokens reused."""
    cached = bench.cache.attach("request", prompt, scope=scope)
    new = len(prompt) - cached
    bench.cache.evict(bench.manager.blocks_to_reserve("request", new))
    bench.manager.reserve("request", new)
    bench.manager.advance("request", new)
    bench.cache.remember("request", prompt)
    bench.manager.free("request")
    bench.manager.check()
    return cached


def test_b13_an_adapter_is_its_content_and_scale() -> None:
    bench = Bench(256)
    prompt = list(range(64))
    base = KeyScope(model="m")
    a, b = KeyScope(model="m", adapter="sha256:aa x1"), KeyScope(model="m", adapter="sha256:bb x1")
    a_half, a_reloaded = KeyScope(model="m", adapter="sha256:aa x0.5"), KeyScope(model="m", adapter="sha256:cc x1")
    assert [serve_in(bench, prompt, scope) for scope in (base, a, b, a_half, a_reloaded)] == [0] * 5
    assert [serve_in(bench, prompt, scope) for scope in (base, a, b, a_half, a_reloaded)] == [63] * 5


def test_b16_a_reset_empties_the_cache_although_a_request_runs() -> None:
    bench = Bench(16)
    prompt = list(range(12))
    bench.serve("running", prompt)
    assert bench.cache.clear() == 3  # blocks that stay until their sequence ends
    bench.write("running", [1, 2, 3, 4])
    assert bench.cache.remember("running", bench.texts["running"]) == 0  # KV of the old weights is not published
    assert bench.serve("new", prompt) == 0
    bench.free("running")
    assert bench.cache.match(prompt).num_cached_tokens == 11
    bench.free("new")
    bench.balanced()


@pytest.mark.parametrize("part", ["model", "rope", "dtype", "kv_dtype"])
def test_b17_another_revision_rotation_or_format_never_hits(part: str) -> None:
    bench = Bench(64)
    prompt = list(range(32))
    one, other = KeyScope(**{part: "one"}), KeyScope(**{part: "other"})
    assert [serve_in(bench, prompt, scope) for scope in (one, other, one, other)] == [0, 0, 31, 31]
    assert one.root(4) != one.root(8)  # nor does another block size


def test_b18_a_reused_block_loses_its_old_entry() -> None:
    bench = Bench(8)
    x, y = list(range(12)), list(range(100, 132))
    bench.serve("x", x)
    bench.free("x")
    bench.serve("y", y)  # takes every block
    assert bench.cache.match([*x, 0]).num_cached_tokens == 0
    assert bench.cache.num_cached == 8
    bench.free("y")
    assert bench.serve("x", x) == 0
    assert bench.cache.num_cached == len(bench.cache.index.blocks) == 8


def test_b20_a_look_up_is_not_a_promise() -> None:
    bench = Bench(12)
    prefix = list(range(20))
    bench.serve("first", [*prefix, 50])
    bench.free("first")
    looked_up = bench.cache.match([*prefix, 60])
    assert looked_up.num_cached_tokens == 20
    bench.serve("foreign", list(range(100, 144)))
    bench.free("foreign")
    found = bench.attach("second", [*prefix, 60])  # looks again, and takes what is there now
    assert found < 20
    bench.write("second", [*prefix, 60][found:])
    bench.verify()


def test_b21_a_burst_of_equal_prompts_keeps_one_copy() -> None:
    bench = Bench(128)
    prompt = list(range(40))
    for seq in range(8):
        bench.attach(seq, prompt)
    assert bench.cache.match(prompt).num_cached_tokens == 0  # nothing is visible before it is computed
    for seq in range(8):
        bench.write(seq, prompt)
        bench.cache.remember(seq, prompt)
        bench.verify()
    assert bench.serve(8, prompt) == 39  # although none of them has finished
    assert bench.cache.num_cached == 10
    assert bench.manager.allocator.num_free == 128 - 10
    for seq in (3, 1, 8, 0, 2, 7, 5, 4, 6):
        bench.free(seq)
    bench.balanced()
    assert bench.cache.num_cached == 10


def test_b25_a_hit_needs_the_same_salt() -> None:
    bench = Bench(256)
    prompt = list(range(64 * 4))
    a, b = KeyScope(salt="a"), KeyScope(salt="b")
    cached = []
    for seq, scope in enumerate((a, b, a)):
        cached.append(bench.cache.attach(seq, prompt, scope=scope))
        new = len(prompt) - cached[-1]
        bench.cache.evict(bench.manager.blocks_to_reserve(seq, new))
        bench.manager.reserve(seq, new)
        bench.manager.advance(seq, new)
        bench.cache.remember(seq, prompt)
        bench.manager.free(seq)
    assert cached == [0, 0, 255]
    assert "'a'" not in repr(a)


def test_b27_a_matched_block_is_not_the_next_to_be_overwritten() -> None:
    """Small pool, many clients with a secret each: no sequence ever reads a slot of another text."""
    rng = random.Random(27)
    bench = Bench(24)
    system = [1] * 10
    for request in range(500):
        client = rng.randrange(16)
        prompt = [*system, *[1000 + client] * rng.randrange(1, 12)]
        while bench.texts and len(bench.texts) > 2:
            bench.free(rng.choice(list(bench.texts)))
        bench.serve(request, prompt)
        if rng.random() < 0.5:
            bench.fork(request, (request, "fork"))
            bench.write((request, "fork"), [1000 + client] * 3)
        bench.write(request, [1000 + client] * 2)
        bench.verify()
    for seq in list(bench.texts):
        bench.free(seq)
    bench.balanced()


def test_b47_a_hit_is_counted_once_and_a_failed_try_disturbs_nothing() -> None:
    bench = Bench(6)
    x = list(range(16))
    bench.serve("x", x)
    bench.free("x")
    for _ in range(50):
        too_large = [*x, *range(100, 112)]  # seven blocks in all
        match = bench.cache.match(too_large)
        assert (match.num_blocks, match.num_idle) == (4, 4)
        assert bench.manager.blocks_needed(len(too_large)) - match.num_blocks > (
            bench.manager.num_available - match.num_idle
        )
        assert bench.attach("too large", too_large) == 16
        with pytest.raises(OutOfBlocks):
            bench.write("too large", too_large[16:])
        bench.free("too large")
        fits = [*x, *range(100, 108)]
        assert bench.attach("fits", fits) == 16
        bench.write("fits", fits[16:])
        bench.free("fits")  # unpublished: its own two blocks are free again
        idle = [block for block, _ in bench.cache.policy.idle_blocks()]
        assert idle == bench.cache.match([*x, 1]).blocks[::-1]
    bench.balanced()


def test_b49_eviction_looks_at_each_evicted_block_once() -> None:
    """A pool full of cached blocks: evicting one costs the same whatever the pool's size."""

    class Counted(dict):  # type: ignore[type-arg]
        deleted = 0

        def __delitem__(self, key: object) -> None:
            Counted.deleted += 1
            super().__delitem__(key)

        def __iter__(self) -> object:  # type: ignore[override]
            raise AssertionError("the index was walked")

        items = keys = values = __iter__  # type: ignore[assignment]

    bench = Bench(4096)
    for i in range(64):
        bench.cache.attach(i, [i] * 256)
        bench.manager.reserve(i, 256)
        bench.manager.advance(i, 256)
        bench.cache.remember(i, [i] * 256)
        bench.manager.free(i)
    bench.cache.index.blocks = Counted(bench.cache.index.blocks)
    with loops_in_python():  # the native loop deletes without asking the dictionary's class
        assert bench.cache.evict(10) == 10
    assert Counted.deleted == 10
