"""Every policy keeps the accounts of PrefixCache, evicts leaves first, and prefers what its name says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.policies import POLICIES, QueueAware, SegmentedLRU, gdsf, lfu, make_policy
from pagedkv.cache.prefix import PrefixCache
from pagedkv.errors import InvalidRequest, OutOfBlocks

BLOCK = 2


class Traffic:
    """Sequences over a real manager and prefix cache; everything is checked after every step."""

    def __init__(self, policy: str, num_blocks: int = 12) -> None:
        self.manager = KVCacheManager(num_blocks, BLOCK)
        self.policy = make_policy(policy)
        self.prefix = PrefixCache(self.manager, policy=self.policy)
        self.texts: dict[int, list[int]] = {}
        self.count = 0

    def begin(self, text: list[int]) -> int | None:
        seq = self.count = self.count + 1
        reused = self.prefix.attach(seq, text)
        needed = self.manager.blocks_to_reserve(seq, len(text) - reused)
        self.prefix.evict(needed)
        try:
            self.manager.reserve(seq, len(text) - reused)
        except OutOfBlocks:
            self.manager.free(seq)
            return None
        self.manager.advance(seq, len(text) - reused)
        self.prefix.remember(seq, text)
        self.texts[seq] = text
        return seq

    def end(self, seq: int) -> None:
        self.manager.free(seq)
        del self.texts[seq]

    def serve(self, text: list[int]) -> None:
        seq = self.begin(text)
        assert seq is not None
        self.end(seq)

    def cached(self, text: list[int]) -> int:
        return self.prefix.match([*text, 99]).num_blocks


steps = st.lists(
    st.one_of(
        st.lists(st.integers(0, 2), min_size=1, max_size=11),  # a prompt that comes
        st.integers(0, 3),  # one of the running sequences that ends
        st.just("expect"),
        st.just("clear"),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(plan=steps)
@settings(max_examples=60, deadline=None)
def test_accounts_hold_and_everything_evictable_can_be_evicted(name: str, plan: list[list[int] | int | str]) -> None:
    traffic = Traffic(name)
    for step in plan:
        if isinstance(step, list):
            traffic.begin(step)
        elif isinstance(step, int):
            if step < len(traffic.texts):
                traffic.end(list(traffic.texts)[step])
        elif step == "clear":
            traffic.prefix.clear()
        elif isinstance(traffic.policy, QueueAware):
            text = next(iter(traffic.texts.values()), [0, 0, 0])
            traffic.policy.expect(traffic.prefix.match(text).blocks)
        traffic.manager.check()
    for seq in list(traffic.texts):
        traffic.end(seq)
    evictable = traffic.prefix.num_evictable
    assert traffic.prefix.evict(traffic.manager.allocator.num_blocks) == evictable
    assert traffic.prefix.num_evictable == 0
    assert traffic.manager.allocator.num_free == traffic.manager.allocator.num_blocks
    traffic.manager.check()


HOT = [1, 1, 1, 1]


def scan(traffic: Traffic, num_prompts: int, first: int = 10) -> None:
    for i in range(num_prompts):
        traffic.serve([first + i] * 4)


def test_segmented_lru_outlives_a_scan_that_plain_lru_does_not() -> None:
    survivors = {}
    for name in ("lru", "slru", "lfu", "gdsf"):
        traffic = Traffic(name)
        scan(traffic, 6, first=100)
        for _ in range(3):
            traffic.serve(HOT)
        scan(traffic, 8)
        survivors[name] = traffic.cached(HOT)
    assert survivors == {"lru": 0, "slru": 2, "lfu": 2, "gdsf": 2}


def test_gdsf_ages_where_lfu_never_forgets() -> None:
    left = {}
    for name in ("lfu", "gdsf"):
        traffic = Traffic(name)
        for _ in range(3):
            traffic.serve(HOT)
        scan(traffic, 40)
        left[name] = traffic.cached(HOT)
    assert left == {"lfu": 2, "gdsf": 0}


def test_gdsf_prefers_to_keep_what_costs_more_to_recompute() -> None:
    policy = gdsf(parity=1)
    policy.publish(0, -1)
    policy.publish(1, 0)
    policy.publish(2, -1)
    for block in (1, 0, 2):
        policy.idle(block)
    assert [policy.pop()[0] for _ in range(3)] == [2, 1, 0]  # 1 lies deeper than 2; 0 waits for its child


def test_lfu_breaks_ties_by_age() -> None:
    policy = lfu()
    for block in (0, 1, 2):
        policy.publish(block, -1)
    for block in (2, 0, 1):
        policy.idle(block)
    policy.busy(2)
    policy.idle(2)
    assert [policy.pop()[0] for _ in range(3)] == [0, 1, 2]


def test_queue_aware_spares_what_waits_then_gives_it_up() -> None:
    traffic = Traffic("queue-aware", num_blocks=6)
    traffic.serve(HOT)
    assert isinstance(traffic.policy, QueueAware)
    traffic.policy.expect(traffic.prefix.match([*HOT, 5]).blocks)
    scan(traffic, 8)
    assert traffic.cached(HOT) == 2
    traffic.policy.expect(())
    scan(traffic, 3)
    assert traffic.cached(HOT) == 0


def test_segmented_lru_keeps_an_ancestor_that_was_never_idle_behind_its_reused_child() -> None:
    policy = SegmentedLRU()
    policy.publish(0, -1)  # in use all along
    policy.publish(1, 0)
    policy.idle(1)
    policy.busy(1)
    policy.idle(1)
    policy.idle(0)
    assert [policy.pop()[0], policy.pop()[0]] == [1, 0]


def test_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"'mru' is none of lru, slru"):
        make_policy("mru")


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_share_of_the_protected_segment_is_checked(share: float) -> None:
    with pytest.raises(InvalidRequest, match="between 0 and 1"):
        SegmentedLRU(share)
