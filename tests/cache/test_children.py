from __future__ import annotations

import random

from pagedkv.cache.children import RUN, ChildIndex
from pagedkv.cache.index import num_common_tokens
from pagedkv.cache.keys import encode_tokens


class Counted(list[bytes]):
    """The tokens of all blocks; counts how often one is looked at."""

    looks = 0

    def __getitem__(self, index: object) -> bytes:  # type: ignore[override]
        self.looks += 1
        return super().__getitem__(index)  # type: ignore[index,return-value]


def test_ten_thousand_children_without_a_walk() -> None:
    rng = random.Random(0)
    n, size = 10_000, 8
    texts = [[rng.randrange(4) for _ in range(size)] + [i] for i in range(n)]
    tokens = Counted(encode_tokens(text) for text in texts)
    index = ChildIndex(n, tokens)
    for block in rng.sample(range(n), n):
        tokens.looks = 0
        index.add(-1, block)
        assert tokens.looks <= 3 * 16
    for _ in range(20):
        probe = encode_tokens([rng.randrange(4) for _ in range(size)] + [rng.randrange(n)])
        tokens.looks = 0
        near = index.around(-1, probe)
        assert tokens.looks <= 2 * 16
        best = max(num_common_tokens(text, probe) for text in list.__iter__(tokens))
        assert max(num_common_tokens(tokens[block], probe) for block in near) == best
    for block in rng.sample(range(n), n):
        tokens.looks = 0
        index.remove(-1, block)
        assert tokens.looks <= 2 * 16
    assert not index.has_any(-1)
    assert index.children(-1) == []


def test_runs_stay_bounded_and_in_order() -> None:
    n = 5 * RUN
    tokens = [encode_tokens([i * 7919 % 1000]) for i in range(n)]
    index = ChildIndex(n, tokens)
    for block in range(n):
        index.add(3, block)
    assert index.children(3) == sorted(range(n), key=index.sort_key)
    present = set(range(n))
    rng = random.Random(1)
    while len(present) > 1:
        gone = rng.sample(sorted(present), max(1, len(present) // 3))
        for block in gone:
            index.remove(3, block)
        present -= set(gone)
        assert index.children(3) == sorted(present, key=index.sort_key)
        probe = encode_tokens([rng.randrange(1000)])
        near = index.around(3, probe)
        assert near
        assert set(near) <= present


def test_common_tokens_are_whole_tokens() -> None:
    a, b = encode_tokens([1, 2, 3]), encode_tokens([1, 2 + 2**24, 3])
    assert num_common_tokens(a, a) == 3
    assert num_common_tokens(a, b) == 1  # they differ in the last byte of the second token only
    assert num_common_tokens(a, b"") == 0
    assert num_common_tokens(a, encode_tokens([1, 2])) == 2
