"""Each reason for which attach stops, from the state that causes it."""

from __future__ import annotations

import pytest

from pagedkv.cache.keys import KeyScope
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.prefix import PrefixCache
from pagedkv.cache.report import AttachReport, StopReason
from pagedkv.errors import BlockStateError, UnknownSequence


class Bench:
    """A small cache and the whole life of requests in it."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.time = 0.0
        self.manager = KVCacheManager(num_blocks, 4)
        self.cache = PrefixCache(self.manager, clock=lambda: self.time)
        self.next_seq = 0

    def serve(self, tokens: list[int], scope: KeyScope | None = None) -> None:
        seq = self.begin(tokens, scope)
        new = len(tokens) - self.manager.lengths[seq]
        self.cache.evict(self.manager.blocks_to_reserve(seq, new))
        self.manager.reserve(seq, new)
        self.manager.advance(seq, new)
        self.cache.remember(seq, tokens)
        self.manager.free(seq)

    def begin(self, tokens: list[int], scope: KeyScope | None = None, read: bool = True) -> int:
        self.next_seq += 1
        self.cache.attach(self.next_seq, tokens, scope=scope, read=read)
        return self.next_seq

    def report(self, tokens: list[int], scope: KeyScope | None = None, read: bool = True) -> AttachReport:
        seq = self.begin(tokens, scope, read)
        report = self.cache.report(seq)
        assert report.num_tokens == len(tokens)
        assert report.num_cached_tokens + report.num_computed_tokens == len(tokens)
        assert report.position == report.num_cached_tokens == self.manager.lengths[seq]
        self.manager.free(seq)
        return report


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_last_token_rule(bench: Bench) -> None:
    bench.serve(list(range(8)))
    report = bench.report(list(range(8)))
    assert (report.reason, report.num_cached_tokens, report.num_partial_tokens) == (StopReason.LAST_TOKEN, 7, 3)


def test_diverged_says_where_and_from_what(bench: Bench) -> None:
    bench.serve([1, 2, 3, 4, 5, 6, 7, 8])
    bench.serve([1, 2, 3, 4, 9, 9, 9, 9])
    report = bench.report([1, 2, 3, 4, 5, 6, 0, 0, 0])
    assert (report.reason, report.position) == (StopReason.DIVERGED, 6)
    assert (report.nearest_position, report.nearest_tokens) == (4, (5, 6, 7, 8))
    at_a_boundary = bench.report([1, 2, 3, 4, 0, 0, 0, 0])
    assert (at_a_boundary.reason, at_a_boundary.position) == (StopReason.DIVERGED, 4)


def test_evicted_says_when_and_under_what_pressure(bench: Bench) -> None:
    text = list(range(12))
    bench.time = 10.0
    bench.serve(text)
    bench.time = 25.0
    assert bench.cache.evict(15) == 2
    bench.time = 30.0
    report = bench.report([*text, 1])
    assert (report.reason, report.num_cached_tokens) == (StopReason.EVICTED, 4)
    assert report.eviction is not None
    assert (report.eviction.idle_since, report.eviction.at, report.eviction.blocks_wanted) == (10.0, 25.0, 15)


def test_an_eviction_after_attach_is_no_reason(bench: Bench) -> None:
    text = list(range(8))
    seq = bench.begin([*text, 1])
    bench.serve(text)
    bench.cache.evict(16)
    assert bench.cache.report(seq).reason is StopReason.NEVER_SEEN


def test_other_scope_names_it(bench: Bench) -> None:
    scope = KeyScope(salt="theirs")
    bench.serve(list(range(8)), scope)
    report = bench.report(list(range(8)))
    assert (report.reason, report.other_scope) == (StopReason.OTHER_SCOPE, scope)


def test_shorter_than_a_block(bench: Bench) -> None:
    bench.serve([1, 2, 3])
    assert bench.report([1, 2, 3]).reason is StopReason.TOO_SHORT


def test_never_seen(bench: Bench) -> None:
    bench.serve([1] * 8)
    assert bench.report([2] * 8).reason is StopReason.NEVER_SEEN
    beyond = bench.report([1] * 20)
    assert (beyond.reason, beyond.position) == (StopReason.NEVER_SEEN, 8)


def test_twin_in_flight_names_the_twin(bench: Bench) -> None:
    text = list(range(12))
    twin = bench.begin([*text, 1])
    report = bench.report([*text, 2])
    assert (report.reason, report.twin) == (StopReason.TWIN_IN_FLIGHT, twin)
    bench.manager.reserve(twin, 12)
    bench.manager.advance(twin, 6)
    bench.cache.remember(twin, text)
    match = bench.cache.match([*text, 2])
    assert (match.num_cached_tokens, match.twin) == (4, twin)  # its next block is the one that we need next
    bench.manager.advance(twin, 6)
    bench.cache.remember(twin, text)
    match = bench.cache.match([*text, 2])
    assert (match.num_cached_tokens, match.twin) == (12, None)


def test_a_twin_that_ends_early_leaves_nobody_waiting(bench: Bench) -> None:
    text = list(range(12))
    bench.manager.free(bench.begin(text))
    assert bench.cache.match(text).twin is None


def test_no_room_for_a_copy() -> None:
    bench = Bench(num_blocks=2)
    bench.serve(list(range(8)))
    report = bench.report(list(range(8)))
    assert (report.reason, report.num_cached_tokens) == (StopReason.NO_ROOM, 4)


def test_not_read(bench: Bench) -> None:
    bench.serve([1] * 8)
    assert bench.report([1] * 8, read=False).reason is StopReason.NOT_READ


def test_only_what_attach_made_has_a_report(bench: Bench) -> None:
    bench.manager.create("plain")
    with pytest.raises(BlockStateError, match="not made by attach"):
        bench.cache.report("plain")
    with pytest.raises(UnknownSequence):
        bench.cache.report("nobody")


def test_b23_a_shared_prefix_just_under_and_over_a_block() -> None:
    for shared, cached in ((3, 3), (4, 4), (5, 5)):
        bench = Bench()
        bench.serve([*range(shared), 70, 71, 72, 73])
        report = bench.report([*range(shared), 80, 81, 82])
        assert report.num_cached_tokens == cached
        assert report.reason is StopReason.DIVERGED
