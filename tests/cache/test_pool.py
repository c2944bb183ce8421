from __future__ import annotations

import pytest
import torch

from pagedkv.cache.manager import BlockCopy
from pagedkv.cache.pool import KVPool
from pagedkv.errors import InvalidRequest

FORMATS = ["auto", "bfloat16", "float16", "float32", "int8_per_token_head", "fp8_e4m3"]


def filled(kv_cache_dtype: str = "auto", num_blocks: int = 6) -> KVPool:
    pool = KVPool(num_blocks, 2, 3, 4, 8, kv_cache_dtype=kv_cache_dtype)
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(num_blocks * 4)
    for layer in range(2):
        k, v = torch.randn(2, num_blocks * 4, 3, 8, generator=generator)
        pool.write(layer, k, v, slots)
    return pool


def test_a_block_is_one_contiguous_run_for_all_layers() -> None:
    pool = KVPool(6, 2, 3, 4, 8)
    assert pool.data.shape == (6, 2, 2, 3, 4, 8)
    assert pool.data[3].is_contiguous()
    assert pool.data[3].nbytes == pool.bytes_per_block == pool.nbytes // 6
    assert pool.k_pool[1].shape == (6, 3, 4, 8)
    pool.k_pool[1][3, 2, 1, 5] = 7.0
    pool.v_pool[1][3, 2, 1, 5] = 8.0
    assert pool.data[3, 1, :, 2, 1, 5].tolist() == [7.0, 8.0]  # views, not copies


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_the_size_of_a_block_is_known_without_a_pool(kv_cache_dtype: str) -> None:
    pool = KVPool(5, 2, 3, 4, 8, dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    size = KVPool.block_bytes(2, 3, 4, 8, dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    assert pool.bytes_per_block == size
    assert pool.nbytes == 5 * size


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_what_is_written_is_read(kv_cache_dtype: str) -> None:
    pool = KVPool(4, 1, 2, 4, 16, kv_cache_dtype=kv_cache_dtype)
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 5, 2, 16, generator=generator) * 3
    pool.write(0, k, v, torch.tensor([13, 2, -1, 7, 0]))
    read_k, read_v = pool.read(0, [3, 0, 1])
    bound = {"int8_per_token_head": 1 / 254, "fp8_e4m3": 1 / 16, "bfloat16": 1 / 256, "float16": 1 / 2048}
    for new, back in ((k, read_k), (v, read_v)):
        for token, (row, offset) in {0: (0, 1), 1: (1, 2), 3: (2, 3), 4: (1, 0)}.items():
            error = (back[row, :, offset] - new[token]).abs()
            assert (error <= bound.get(kv_cache_dtype, 0.0) * new[token].abs().amax(-1, keepdim=True) + 1e-9).all()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_per_token_head", "fp8_e4m3"])
def test_copies_move_all_layers_and_scales(kv_cache_dtype: str) -> None:
    pool = filled(kv_cache_dtype)
    before = [[t.clone() for t in pool.read(layer, range(6))] for layer in range(2)]
    pool.copy_blocks([BlockCopy(0, 4), BlockCopy(1, 5)])
    for layer in range(2):
        for tensor, old in zip(pool.read(layer, range(6)), before[layer], strict=True):
            assert torch.equal(tensor, old[[0, 1, 2, 3, 0, 1]])


@pytest.mark.parametrize(
    ("copies", "source_of"),
    [
        ([BlockCopy(0, 1), BlockCopy(2, 0)], [2, 0, 2, 3, 4, 5]),  # a source is handed out again in the same plan
        ([BlockCopy(0, 1), BlockCopy(1, 2)], [0, 0, 0, 3, 4, 5]),  # a copy of a copy
        ([BlockCopy(0, 1), BlockCopy(3, 1)], [0, 3, 2, 3, 4, 5]),  # the first was dropped, its block handed out again
        ([BlockCopy(0, 1), BlockCopy(0, 2), BlockCopy(0, 3)], [0, 0, 0, 0, 4, 5]),
        ([], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_copies_are_carried_out_in_their_order(copies: list[BlockCopy], source_of: list[int]) -> None:
    pool = filled()
    before = pool.data.clone()
    pool.copy_blocks(copies)
    assert torch.equal(pool.data, before[source_of])


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "fp8_e4m3"])
def test_extreme_rows_do_not_spoil_their_neighbours(kv_cache_dtype: str) -> None:
    pool = KVPool(1, 1, 1, 4, 4, kv_cache_dtype=kv_cache_dtype)
    rows = torch.tensor([[0.0, 0, 0, 0], [1e-42, 0, 0, 0], [float("inf"), 1, 0, 0], [1.0, -2, 3, -4]])
    pool.write(0, rows[:, None], rows[:, None], torch.arange(4))
    k, _ = pool.read(0, [0])
    assert k[0, 0, 0].tolist() == [0.0] * 4
    assert k[0, 0, 1].abs().max() <= 1e-38
    assert not torch.isnan(k[0, 0, 2]).any()
    assert torch.allclose(k[0, 0, 3], rows[3], atol=4 / 16)


def test_the_scale_rule_is_that_of_the_attention_backends() -> None:
    from pagedkv.attention.reference import quantise

    values = torch.randn(7, 3, 8, generator=torch.Generator().manual_seed(2))
    for name, dtype in (("int8_per_token_head", torch.int8), ("fp8_e4m3", torch.float8_e4m3fn)):
        pool = KVPool(7, 1, 3, 1, 8, kv_cache_dtype=name)
        pool.write(0, values, values, torch.arange(7))
        stored, scale = quantise(values, dtype)
        assert pool.k_scale[0] is not None
        assert scale is not None
        assert torch.equal(pool.k_pool[0][:, :, 0].float(), stored.float())
        assert torch.equal(pool.k_scale[0][:, :, 0], scale)


def test_bad_sizes_and_formats_are_named() -> None:
    with pytest.raises(InvalidRequest, match="head_dim is 0"):
        KVPool(1, 1, 1, 1, 0)
    with pytest.raises(InvalidRequest, match=r"kv_cache_dtype is 'int4'; known are auto, bfloat16"):
        KVPool(1, 1, 1, 1, 1, kv_cache_dtype="int4")
