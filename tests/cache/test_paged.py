from __future__ import annotations

import pytest
import torch

from pagedkv.cache.paged import PagedKVCache
from pagedkv.cache.prefix import PrefixCache
from pagedkv.errors import InvalidRequest

LAYERS, HEADS, DIM = 2, 2, 8


def make(num_blocks: int = 16, **options: object) -> PagedKVCache:
    return PagedKVCache(LAYERS, num_blocks, 4, HEADS, DIM, **options)  # type: ignore[arg-type]


def random_kv(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(LAYERS, 2, rows, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed))


History = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def feed(cache: PagedKVCache, seqs: list[object], kv: torch.Tensor, positions: torch.Tensor) -> list[History]:
    cache.set_batch(seqs)
    return [cache.update(layer, *kv[layer], positions) for layer in range(LAYERS)]  # type: ignore[misc]


def test_update_returns_the_history_of_each_row() -> None:
    cache = make()
    for seq in ("a", "b"):
        cache.create(seq)
        cache.reserve(seq, 6)
    first = random_kv(2, 6, 0)
    for layer, (keys, values, logical) in enumerate(feed(cache, ["a", "b"], first, torch.arange(6))):
        assert torch.equal(keys, first[layer, 0])
        assert torch.equal(values, first[layer, 1])
        assert logical.tolist() == list(range(6))
    assert cache.lengths == {"a": 6, "b": 6}
    cache.reserve("b", 1)
    one = random_kv(1, 1, 1)
    for layer, (keys, _, _) in enumerate(feed(cache, ["b"], one, torch.tensor([6]))):
        assert torch.equal(keys[0, :, :6], first[layer, 0, 1])
        assert torch.equal(keys[0, :, 6:], one[layer, 0, 0])
    assert cache.lengths == {"a": 6, "b": 7}


def test_ragged_rows_are_padded_with_zeros_not_with_garbage() -> None:
    cache = make()
    cache.pool.data.fill_(float("nan"))
    for seq, length in (("a", 2), ("b", 7)):
        cache.create(seq)
        cache.reserve(seq, length)
    kv = random_kv(2, 7, 2)
    positions = torch.arange(7).repeat(2, 1)
    positions[0, 2:] = -1  # padding
    for layer, (keys, values, _) in enumerate(feed(cache, ["a", "b"], kv, positions)):
        assert torch.equal(keys[0, :, :2], kv[layer, 0, 0, :, :2])
        assert (keys[0, :, 2:] == 0).all()
        assert (values[0, :, 2:] == 0).all()
        assert torch.equal(values[1], kv[layer, 1, 1])
    assert cache.lengths == {"a": 2, "b": 7}


def test_rows_choose_sequences_of_the_batch() -> None:
    cache = make()
    for seq in "abc":
        cache.create(seq)
        cache.reserve(seq, 3)
    cache.set_batch(["a", "b", "c"])
    kv = random_kv(2, 3, 3)
    for layer in range(LAYERS):
        keys, _, _ = cache.update(layer, *kv[layer], torch.arange(3), rows=[2, 0])
        assert torch.equal(keys, kv[layer, 0])
    assert cache.lengths == {"a": 3, "b": 0, "c": 3}
    assert torch.equal(cache.k_pool[0][cache.tables["c"][0], :, :3], kv[0, 0, 0])


def test_copy_on_write_copies_all_layers() -> None:
    cache = make()
    cache.create("a")
    cache.reserve("a", 6)
    kv = random_kv(1, 6, 4)
    feed(cache, ["a"], kv, torch.arange(6))
    cache.fork("a", "b")
    ours, theirs = random_kv(1, 1, 5), random_kv(1, 1, 6)
    for seq, new in (("b", theirs), ("a", ours)):
        cache.reserve(seq, 1)
        for layer, (keys, values, _) in enumerate(feed(cache, [seq], new, torch.tensor([6]))):
            assert torch.equal(keys[0], torch.cat([kv[layer, 0, 0], new[layer, 0, 0]], 1))
            assert torch.equal(values[0], torch.cat([kv[layer, 1, 0], new[layer, 1, 0]], 1))
    cache.check()


def test_a_write_into_a_shared_or_unreserved_block_is_refused() -> None:
    cache = make()
    cache.create("a")
    cache.reserve("a", 6)
    feed(cache, ["a"], random_kv(1, 6, 7), torch.arange(6))
    cache.fork("a", "b")
    before = cache.pool.data.clone()
    with pytest.raises(InvalidRequest, match="position 6 of 'b' lies in a shared block"):
        feed(cache, ["b"], random_kv(1, 1, 8), torch.tensor([6]))
    with pytest.raises(InvalidRequest, match="position 8 of 'b' is not reserved"):
        feed(cache, ["b"], random_kv(1, 1, 8), torch.tensor([8]))
    with pytest.raises(InvalidRequest, match="do not fit 1 rows"):
        feed(cache, ["b"], random_kv(2, 1, 8), torch.tensor([8]))
    assert torch.equal(cache.pool.data.nan_to_num(), before.nan_to_num())
    assert cache.lengths == {"a": 6, "b": 6}


def test_block_tables_are_padded_to_the_longest() -> None:
    cache = make()
    for seq, length in (("a", 1), ("b", 9)):
        cache.create(seq)
        cache.reserve(seq, length)
    cache.set_batch(["a", "b"])
    assert cache.block_tables.dtype == torch.int32
    assert cache.block_tables.tolist() == [[*cache.tables["a"], 0, 0], cache.tables["b"]]


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "fp8_e4m3"])
def test_quantised_blocks_carry_their_scales_through_a_prefix_hit(kv_cache_dtype: str) -> None:
    cache = make(kv_cache_dtype=kv_cache_dtype)
    prefix = PrefixCache(cache)
    prompt = list(range(8))
    prefix.attach("a", prompt)
    cache.reserve("a", 8)
    kv = random_kv(1, 8, 9) * torch.logspace(-3, 3, 8)[:, None]
    whole = feed(cache, ["a"], kv, torch.arange(8))
    prefix.remember("a", prompt)
    cache.free("a")
    assert prefix.attach("b", prompt) == 7
    assert len(cache.reserve("b", 1)) == 1
    again = feed(cache, ["b"], kv[..., 7:, :], torch.tensor([7]))
    for first, second in zip(whole, again, strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
    cache.check()


def test_a_prefix_cache_works_over_either_cache() -> None:
    cache = make()
    prefix = PrefixCache(cache)
    cache.create("a")
    cache.reserve("a", 8)
    feed(cache, ["a"], random_kv(1, 8, 10), torch.arange(8))
    assert prefix.remember("a", list(range(8))) == 2
    assert prefix.attach("b", list(range(9))) == 8
    cache.check()
