"""write_kv and copy_blocks in Triton's interpreter: the very bytes of the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from paged_case import paged_case

from pagedkv.attention.dispatch import write_kv
from pagedkv.attention.reference import ReferenceAttention, quantise
from pagedkv.attention.triton_backend import TritonAttention
from pagedkv.attention.triton_copy import copy_blocks
from pagedkv.cache.pool import KVPool
from pagedkv.errors import InvalidRequest

POOLS = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def written(
    backend: object, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, slots: list[int]
) -> list[torch.Tensor]:
    """Pools and scales (7 blocks of 4, as a KVPool lays them out) after one write, as bytes.

    With the block before the pool's first, which a slot of -1 would hit if it were written.
    """
    _, kv_heads, head_dim = k.shape
    all_data = torch.zeros(8, 3, 2, kv_heads, 4, head_dim).to(dtype)
    all_scales = torch.full(all_data.shape[:-1], -7.0)
    data, scales = all_data[1:], all_scales[1:]
    quantised = dtype in (torch.int8, torch.float8_e4m3fn)
    k_scale, v_scale = (scales[:, 1, 0], scales[:, 1, 1]) if quantised else (None, None)
    write_kv(k, v, data[:, 1, 0], data[:, 1, 1], torch.tensor(slots), k_scale=k_scale, v_scale=v_scale, backend=backend)  # type: ignore[arg-type]
    return [all_data.view(torch.uint8), all_scales]


@pytest.mark.parametrize("pool_dtype", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 80), (1, 8)])
def test_same_bytes_as_the_reference(pool_dtype: torch.dtype, dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    """Rows of a wider tensor (q, k, v in one), a skipped slot, a row of zeros, an outlier."""
    random = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 4, 3 * kv_heads, head_dim, generator=random).to(dtype)[:, :, kv_heads : 2 * kv_heads]
    k[0] = 0.0
    k[1, :, 3] *= 50.0
    slots = [9, 27, -1, 0]
    got = written(TritonAttention("cpu"), k, v, pool_dtype, slots)
    reference = written(ReferenceAttention(), k, v, pool_dtype, slots)
    if (dtype, pool_dtype) == (torch.float32, torch.bfloat16):  # the interpreter's own conversion is off by one place
        got[0], reference[0] = got[0].view(pool_dtype).float(), reference[0].view(pool_dtype).float()
        torch.testing.assert_close(got[0], reference[0], rtol=2**-7, atol=0)
    else:
        assert torch.equal(got[0], reference[0])
    assert torch.equal(got[1], reference[1])


@pytest.mark.parametrize("pool_dtype", [torch.int8, torch.float8_e4m3fn])
def test_b62_values_beyond_range_saturate(pool_dtype: torch.dtype) -> None:
    """Infinities become the largest number; a NaN shows in the scale, and the stored bytes hold none."""
    k = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    k[0, 0, 3], k[1, 1, 4], k[2, 0, 5] = float("inf"), float("-inf"), float("nan")
    got = written(TritonAttention("cpu"), k, k, pool_dtype, [0, 1, 2])
    reference = written(ReferenceAttention(), k, k, pool_dtype, [0, 1, 2])
    assert torch.equal(got[0], reference[0])
    assert torch.equal(got[1].nan_to_num(-3.0), reference[1].nan_to_num(-3.0))
    assert not got[0].view(pool_dtype).float().isnan().any()


def test_e4m3_rounds_as_torch_does() -> None:
    """Every e4m3 number, every midpoint between two, and their neighbours in float32, on both sides of zero."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    both = torch.cat([numbers, middles, torch.nextafter(middles, numbers[1:]), torch.nextafter(middles, numbers[:-1])])
    values = torch.cat([both, -both])
    rows = torch.cat([values, torch.zeros(-len(values) % 15)]).view(-1, 15)
    rows = torch.cat([rows, torch.full((len(rows), 1), 448.0)], 1)[:, None]  # the largest of each row: factor 1
    slots = list(range(len(rows)))
    data = torch.zeros(len(rows), 2, 1, 1, 16).to(torch.float8_e4m3fn)
    scale = torch.zeros(len(rows), 1, 1)
    write_kv(
        rows,
        rows,
        data[:, 0],
        data[:, 1],
        torch.tensor(slots),
        k_scale=scale,
        v_scale=scale,
        backend=TritonAttention("cpu"),
    )
    assert torch.equal(data[:, 0, :, 0].view(torch.uint8), quantise(rows, torch.float8_e4m3fn)[0].view(torch.uint8))
    assert torch.equal(data[:, 0, :, 0].view(torch.uint8), rows.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "outlier", "bound"),
    [("int8_per_token_head", 1, 0.02), ("fp8_e4m3", 1, 0.05), ("int8_per_token_head", 50, 0.4), ("fp8_e4m3", 50, 0.1)],
)
def test_b62_scales_move_with_the_block(name: str, outlier: int, bound: float) -> None:
    """Written quantised; forked blocks are copied with their scales, the sources destroyed, the copies read.

    With one channel of K fifty times the others, int8 has few steps left for those: fp8 is the format for such a model.
    """
    case = paged_case([40], heads=4, kv_heads=2, head_dim=32, block_size=8)
    case.k_pool[..., 5] *= outlier
    exact = case.expected()
    pool = KVPool(12, 2, 2, 8, 32, kv_cache_dtype=name)
    pool.data.view(torch.uint8).fill_(0x7F)
    pool.scales.fill_(float("nan"))  # type: ignore[union-attr]
    table = [3, 1, 7, 2, 11]
    slots = torch.tensor([table[p // 8] * 8 + p % 8 for p in range(40)])
    source = [case.tables[0][p // 8] for p in range(40)]
    k = torch.stack([case.k_pool[block, :, p % 8] for p, block in enumerate(source)])
    v = torch.stack([case.v_pool[block, :, p % 8] for p, block in enumerate(source)])
    backend = TritonAttention("cpu")
    write_kv(
        k, v, pool.k_pool[1], pool.v_pool[1], slots, k_scale=pool.k_scale[1], v_scale=pool.v_scale[1], backend=backend
    )
    copied = [4, 0, 8, 5, 6]
    copy_blocks(pool.data, list(zip(table, copied, strict=True)))
    copy_blocks(pool.scales, list(zip(table, copied, strict=True)))  # type: ignore[arg-type]
    pool.data[table].view(torch.uint8).fill_(0x7F)
    pool.scales[table] = float("nan")  # type: ignore[index]
    case.batch.block_table[0, :5] = torch.tensor(copied, dtype=torch.int32)
    forked = dataclasses.replace(
        case, k_pool=pool.k_pool[1], v_pool=pool.v_pool[1], k_scale=pool.k_scale[1], v_scale=pool.v_scale[1]
    )
    assert forked.error(backend) < 1e-5
    relative = (forked.attend(backend).double() - exact).norm() / exact.norm()
    assert relative < bound


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (9, 2, 5, 300)), (torch.int8, (9, 7)), (torch.bfloat16, (9, 3, 3))]
)
def test_copy_blocks(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    data = torch.randint(-100, 100, shape).to(dtype)
    expected = data.clone()
    copies = [(8, 0), (2, 5), (8, 3)]
    for source, destination in copies:
        expected[destination] = data[source]
    copy_blocks(data, copies)
    assert torch.equal(data, expected)
    copy_blocks(data, [])


@pytest.mark.parametrize("copies", [[(1, 2), (3, 2)], [(1, 2), (2, 3)], [(0, 9)], [(-1, 2)]])
def test_copies_that_cannot_run_side_by_side_are_refused(copies: list[tuple[int, int]]) -> None:
    data = torch.arange(9.0)[:, None].repeat(1, 4)
    before = data.clone()
    with pytest.raises(InvalidRequest, match=r"two copies|source and destination|block ids reach"):
        copy_blocks(data, copies)
    assert torch.equal(data, before)


def test_a_view_of_a_pool_is_not_copied_by_blocks() -> None:
    with pytest.raises(InvalidRequest, match="contiguous"):
        copy_blocks(torch.zeros(4, 6)[:, ::2], [(0, 1)])
