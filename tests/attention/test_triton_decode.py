"""The decode kernel in Triton's interpreter against the reference in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from paged_case import paged_case

from pagedkv.attention.triton_backend import TritonAttention

EXACT = 2e-6  # of float32 products against float64
HALF = {torch.float16: 2e-3, torch.bfloat16: 2e-2}  # the output's own rounding, values up to about 4


def triton(**options: object) -> TritonAttention:
    return TritonAttention("cpu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (9, 3), (7, 1), (8, 1), (20, 1)])
def test_every_group_ratio(heads: int, kv_heads: int) -> None:
    case = paged_case([1, 17, 70], heads=heads, kv_heads=kv_heads)
    assert case.error(triton()) < EXACT


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 48, 64, 128, 256])
def test_every_block_size(block_size: int) -> None:
    """Lengths at a block's border, one past it and inside; with one head alone for two of the sizes."""
    for heads in (2, 4) if block_size in (8, 128) else (4,):
        case = paged_case([block_size, block_size + 1, 80], heads=heads, kv_heads=heads // 2, block_size=block_size)
        assert case.error(triton(splits=2)) < EXACT


@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 96, 112, 128, 160, 192, 256])
def test_b57_head_dim_that_is_no_power_of_two(head_dim: int) -> None:
    assert paged_case([70], head_dim=head_dim).error(triton()) < EXACT
    assert paged_case([40], heads=1, kv_heads=1, head_dim=head_dim).error(triton()) < EXACT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 4])
def test_sixteen_bit(dtype: torch.dtype, heads: int) -> None:
    assert paged_case([5, 70], heads=heads, dtype=dtype).error(triton(splits=2)) < HALF[dtype]
    assert paged_case([40], heads=heads, pool_dtype=dtype).error(triton()) < EXACT


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (7, 3), (64, 1), (64, 3), (1000, 1)])
def test_window(window: int, splits: int) -> None:
    case = paged_case([7, 8, 130])
    assert case.error(triton(splits=splits), window=window) < EXACT


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1000.0])
def test_softcap(softcap: float) -> None:
    """Scores large and small beside it. With q and k in quarters float32 sums of their products are exact in any order,
    so what is off is the cap's doing.
    """
    case = paged_case([3, 40])
    case = dataclasses.replace(case, q=(case.q * 4).round() / 4, k_pool=(case.k_pool * 4).round() / 4)
    assert case.error(triton(), softcap=softcap, scale=4.0) < 5e-6
    assert case.error(triton(), softcap=softcap, scale=0.25) < 5e-6


@pytest.mark.parametrize("splits", [1, 2])
def test_sinks_take_part_in_the_denominator_only(splits: int) -> None:
    sinks = torch.tensor([0.0, 5.0, -3.0, float("-inf")])
    assert paged_case([0, 1, 70]).error(triton(splits=splits), sinks=sinks) < EXACT


def test_splits_are_chosen_when_not_given() -> None:
    assert paged_case([400]).error(triton()) < EXACT


@pytest.mark.parametrize(("heads", "splits"), [(2, 1), (4, 2), (4, 7)])
def test_b56_length_zero_and_more_splits_than_blocks(splits: int, heads: int) -> None:
    case = paged_case([0, 1, 5], [0, 1, 1], heads=heads, kv_heads=heads // 2)
    assert case.error(triton(splits=splits)) < EXACT


@pytest.mark.parametrize("splits", [1, 3])
def test_b56_batch_of_empty_rows_gives_zeros(splits: int) -> None:
    """Padding rows of a captured graph: one query, nothing to attend to."""
    case = paged_case([4, 4])
    case.batch.seq_lens.zero_()
    assert case.attend(triton(splits=splits)).abs().max() == 0.0
    assert case.attend(triton(splits=splits), sinks=torch.ones(4)).abs().max() == 0.0


@pytest.mark.parametrize(("block_size", "splits"), [(16, 1), (64, 2), (128, None), (256, 7)])
def test_b61_the_needle_is_found_at_every_border(block_size: int, splits: int | None) -> None:
    """One key answers a head's query, all others are orthogonal; its value comes back wherever it lies."""
    length = 1030
    positions = sorted({0, 1, 63, 64, block_size - 1, block_size, 511, 512, 1023, 1024, length - 1})
    case = paged_case([length], heads=len(positions), kv_heads=1, head_dim=16, block_size=block_size)
    needles = 40.0 * torch.eye(16)[: len(positions)]
    case.q[0] = needles
    k, v = torch.zeros(length, 16), torch.zeros(length, 16)
    k[positions], v[positions] = needles, needles.flip(1)
    for index, block in enumerate(case.tables[0]):
        here = slice(index * block_size, min((index + 1) * block_size, length))
        case.k_pool[block, 0, : here.stop - here.start] = k[here]
        case.v_pool[block, 0, : here.stop - here.start] = v[here]
    torch.testing.assert_close(case.attend(triton(splits=splits), scale=1.0)[0], needles.flip(1))


def test_b61_a_launch_planned_short_is_right_for_long_sequences() -> None:
    """A captured graph keeps its grid and splits; the lengths on the device may have grown since."""
    case = paged_case([300, 3])
    short = dataclasses.replace(case.batch, max_seq_len=3)
    captured = dataclasses.replace(case, batch=short)
    assert captured.error(triton()) < EXACT


def test_b60_pools_that_are_views() -> None:
    """K and V interleaved, heads transposed, heads cut out of more, dimensions cut out of wider ones."""
    case = paged_case([5, 40], heads=4, kv_heads=2)
    blocks, kv_heads, block_size, head_dim = case.k_pool.shape
    wide_k = torch.full((blocks, block_size, kv_heads + 3, head_dim + 5), float("nan"))
    wide_v = torch.full((blocks, block_size, kv_heads + 1, head_dim * 2), float("nan"))
    k_pool = wide_k[:, :, 1 : 1 + kv_heads, 2 : 2 + head_dim].transpose(1, 2)
    v_pool = wide_v[:, :, :kv_heads, ::2].transpose(1, 2)
    k_pool.copy_(case.k_pool)
    v_pool.copy_(case.v_pool)
    q = torch.cat([case.q, case.q], -1)[..., head_dim:]
    assert dataclasses.replace(case, q=q, k_pool=k_pool, v_pool=v_pool).error(triton(splits=2)) < EXACT


def test_b54_offsets_beyond_32_bits() -> None:
    """A sparse pool whose last blocks lie past 2^31 elements; only touched pages take memory."""
    heads, block_size, head_dim = 4, 256, 128
    block = heads * block_size * head_dim
    num_blocks = 2**31 // block + 4
    pool = torch.empty(num_blocks, heads, block_size, head_dim, dtype=torch.int8).view(torch.uint8)
    case = paged_case([300], heads=8, kv_heads=heads, head_dim=head_dim, block_size=block_size, pool_dtype=torch.int8)
    table = [num_blocks - 1, num_blocks - 3]
    assert table[0] * block > 2**31
    k_pool = v_pool = pool.view(torch.int8)
    k_scale = torch.empty(num_blocks, heads, block_size)
    for target, source in zip(table, case.tables[0], strict=True):
        k_pool[target] = case.k_pool[source]
        k_scale[target] = case.k_scale[source]  # type: ignore[index]
    batch = dataclasses.replace(case.batch, block_table=torch.tensor([table], dtype=torch.int32))
    big = dataclasses.replace(case, k_pool=k_pool, v_pool=v_pool, k_scale=k_scale, v_scale=k_scale, batch=batch)
    assert big.error(triton()) < 1e-4
