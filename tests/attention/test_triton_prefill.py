"""The prefill kernel, which also serves mixed batches, in Triton's interpreter against the reference in float64."""

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


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ([33], [33]),  # a whole prompt
        ([100], [20]),  # a chunk with history
        ([90, 1, 40, 17], [1, 1, 40, 5]),  # decodes and chunks in one launch
        ([5, 0, 9, 70], [5, 0, 0, 2]),  # nothing new in two of them
        ([2, 2, 2, 2, 2, 2, 2], [2, 1, 2, 1, 2, 1, 2]),  # many tiles hardly filled
    ],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_ragged_batches(seq_lens: list[int], query_lens: list[int], splits: int) -> None:
    assert paged_case(seq_lens, query_lens).error(triton(splits=splits)) < EXACT


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (7, 1), (8, 1), (20, 1)])
def test_every_group_ratio(heads: int, kv_heads: int) -> None:
    assert paged_case([20, 41], [20, 5], heads=heads, kv_heads=kv_heads).error(triton()) < EXACT


@pytest.mark.parametrize("block_size", [1, 8, 48, 64, 256])
def test_every_block_size(block_size: int) -> None:
    case = paged_case([block_size + 1, 70, block_size], [2, 30, 1], block_size=block_size)
    assert case.error(triton()) < EXACT


@pytest.mark.parametrize("head_dim", [8, 40, 80, 96, 160, 256])
def test_b57_head_dim_that_is_no_power_of_two(head_dim: int) -> None:
    assert paged_case([20, 70], [20, 3], kv_heads=1, head_dim=head_dim).error(triton()) < EXACT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit(dtype: torch.dtype) -> None:
    assert paged_case([20, 70], [20, 3], dtype=dtype).error(triton(splits=2)) < HALF[dtype]


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (9, 2), (64, 1)])
def test_window(window: int, splits: int) -> None:
    """Tokens of one tile see different parts of the history; what lies before all of them is not read."""
    case = paged_case([40, 90, 30], [40, 20, 1])
    error = case.error(triton(splits=splits), window=window)
    assert error < EXACT
    before_window = case.tables[1][(90 - 20 + 1 - window) // 16 - 1] if window < 60 else None
    if before_window is not None:
        case.k_pool[before_window] = float("nan")
        case.v_pool[before_window] = float("nan")
        assert not case.attend(triton(splits=splits), window=window).isnan().any()


def test_softcap_and_sinks() -> None:
    case = paged_case([20, 70], [20, 3])
    sinks = torch.tensor([0.0, 5.0, -3.0, float("-inf")])
    assert case.error(triton(), softcap=5.0, scale=2.0) < 5e-6
    assert case.error(triton(splits=2), softcap=5.0, sinks=sinks) < 5e-6


@pytest.mark.parametrize("splits", [1, 2])
def test_b56_queries_without_keys_give_zeros(splits: int) -> None:
    """A row of padding among chunks: a query, and a length of 0 on the device."""
    case = paged_case([8, 3, 20], [8, 1, 4])
    case.batch.seq_lens[1] = 0
    out = case.attend(triton(splits=splits))
    assert out[8].abs().max() == 0.0
    rest = [*range(8), *range(9, 13)]
    case.batch.seq_lens[1] = 3
    torch.testing.assert_close(out[rest].double(), case.expected()[rest], atol=EXACT, rtol=0)


@pytest.mark.parametrize("splits", [1, None])
def test_b61_the_needle_is_found_at_every_border(splits: int | None) -> None:
    """Each query of a chunk has one key that answers it; the others are orthogonal."""
    length = 530
    positions = [0, 1, 15, 16, 63, 64, 127, 128, 255, 256, 511, 512, length - 16]
    case = paged_case([length], [16], heads=2, kv_heads=1, head_dim=16)
    needles = 40.0 * torch.eye(16)
    case.q.copy_(needles[:, None].expand(16, 2, 16))
    k, v = torch.zeros(length, 16), torch.zeros(length, 16)
    k[positions], v[positions] = needles[: len(positions)], needles[: len(positions)].flip(1)
    for index, block in enumerate(case.tables[0]):
        here = slice(index * 16, min((index + 1) * 16, length))
        case.k_pool[block, 0, : here.stop - here.start] = k[here]
        case.v_pool[block, 0, : here.stop - here.start] = v[here]
    found = case.attend(triton(splits=splits), scale=1.0)[: len(positions), 0]
    torch.testing.assert_close(found, needles[: len(positions)].flip(1))


def test_b60_pools_that_are_views() -> None:
    case = paged_case([5, 40], [5, 20])
    wide = torch.full((*case.k_pool.shape[:1], 16, 2, 2, 32), float("nan"))
    k_pool, v_pool = wide[:, :, 0].transpose(1, 2), wide[:, :, 1].transpose(1, 2)
    k_pool.copy_(case.k_pool)
    v_pool.copy_(case.v_pool)
    assert dataclasses.replace(case, k_pool=k_pool, v_pool=v_pool).error(triton()) < EXACT


@pytest.mark.parametrize("pool_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 20, 1]])
def test_quantised_pools_are_read_exactly(pool_dtype: torch.dtype, query_lens: list[int]) -> None:
    """Against the reference on the same stored bytes and scales: only float32 rounding is left."""
    case = paged_case([3, 40, 70], query_lens, pool_dtype=pool_dtype)
    assert case.error(triton(splits=2)) < 5e-6
    if pool_dtype == torch.float8_e4m3fn:
        assert case.error(triton(native_fp8=True)) < 5e-6
        half = paged_case([3, 40, 70], query_lens, pool_dtype=pool_dtype, dtype=torch.float16, heads=2)
        assert half.error(triton()) < HALF[torch.float16]
