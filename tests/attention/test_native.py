"""The native kernels of every instruction set here, against the reference in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from native_isa import ISAS, forced
from paged_case import paged_case

from pagedkv.attention.dispatch import write_kv
from pagedkv.errors import InvalidRequest

POOLS = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
RAGGED = ([1, 5, 300, 64, 700], [1, 5, 37, 1, 1])


def tolerance(isa: str, pool: torch.dtype) -> float:
    """bf16 dot products round the query and the weights to 8 bits, integer ones to 15; everything else is float32."""
    if isa != "avx512bf16" or pool in (torch.float32, torch.float16):
        return 5e-6
    return 1e-3 if pool == torch.int8 else 2e-2


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_every_pool_format_equals_the_reference(isa: str, pool: torch.dtype) -> None:
    with forced(isa):
        for heads, kv_heads, head_dim, block_size in ((9, 3, 64, 16), (4, 4, 80, 1), (8, 1, 128, 64), (26, 2, 16, 7)):
            case = paged_case(*RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
                              pool_dtype=pool)  # fmt: skip
            assert case.error("native") < tolerance(isa, pool)


@pytest.mark.parametrize(
    "features",
    [{"window": 1}, {"window": 50}, {"softcap": 5.0}, {"sinks": True}, {"window": 300, "sinks": True, "softcap": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("isa", ISAS)
def test_window_softcap_and_sinks(isa: str, features: dict[str, object]) -> None:
    case = paged_case(*RAGGED, heads=6, kv_heads=2, head_dim=64)
    if features.get("sinks"):
        features = {**features, "sinks": torch.linspace(-2, 3, 6)}
    with forced(isa):
        assert case.error("native", **features) < 5e-6


@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 1, 33])
@pytest.mark.parametrize("isa", ISAS)
def test_b57_every_head_dim(isa: str, head_dim: int) -> None:
    with forced(isa):
        for pool in (torch.float32, torch.bfloat16, torch.int8):
            case = paged_case([70, 9], [3, 1], head_dim=head_dim, pool_dtype=pool, block_size=8)
            assert case.error("native") < tolerance(isa, pool)


@pytest.mark.parametrize("isa", ISAS)
def test_block_sizes_and_group_ratios(isa: str) -> None:
    with forced(isa):
        for block_size in (1, 2, 3, 8, 16, 31, 48, 64, 100, 128, 256):
            group = block_size % 13 + 1
            case = paged_case([300, 17], [40, 1], heads=2 * group, head_dim=32, block_size=block_size)
            assert case.error("native") < 5e-6


def test_b57_a_head_dim_beyond_the_kernels_is_refused_by_name() -> None:
    case = paged_case([5], head_dim=264)
    with pytest.raises(InvalidRequest, match="264"):
        case.attend("native")


@pytest.mark.parametrize("isa", ISAS)
def test_int8_at_the_ends_of_its_range(isa: str) -> None:
    """The widest head, every byte at an end, queries of one sign: where integer sums would overflow first."""
    with forced(isa):
        for byte in (-128, 127):
            case = paged_case([300], [3], heads=2, kv_heads=1, head_dim=256, pool_dtype=torch.int8)
            case.k_pool.fill_(byte)
            case.v_pool.fill_(byte)
            case.q.fill_(3.0)
            assert case.error("native") < tolerance(isa, torch.int8) * 128
        case.q.zero_()
        assert case.error("native") < tolerance(isa, torch.int8) * 128


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_in_a_scale_or_a_query_is_not_hidden(isa: str) -> None:
    with forced(isa):
        for spoil in ("k_scale", "v_scale", "q"):
            case = paged_case([70], [1], heads=2, kv_heads=1, head_dim=64, pool_dtype=torch.int8)
            if spoil == "q":
                case.q[0, :, 5] = float("nan")
            else:
                getattr(case, spoil)[case.tables[0][0], 0, 3] = float("nan")
            assert case.attend("native").isnan().all(), spoil


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_sixteen_bits(isa: str, dtype: torch.dtype) -> None:
    with forced(isa):
        assert paged_case(*RAGGED, dtype=dtype).error("native") < 2e-2


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_write_kv_gives_the_bits_of_the_reference(isa: str, pool: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    values = torch.randn(40, 3, 44, generator=random) * torch.logspace(-8, 8, 40)[:, None, None]
    values[0, 0] = torch.tensor([float("inf"), -1.0] * 22)
    values[1, 1] = 0.0
    values[2, 2, 0] = float("nan")
    values[3] = values[3] * 1e-38
    slots = torch.randperm(48, generator=random)[:40]
    slots[5] = -1
    results = []
    with forced(isa):
        for backend in ("native", "reference"):
            data = torch.zeros(6, 2, 3, 8, 44).to(pool)
            scales = torch.zeros(6, 2, 3, 8) if pool in POOLS[3:] else None
            k_scale, v_scale = (None, None) if scales is None else (scales[:, 0], scales[:, 1])
            write_kv(values, values.flip(0).half(), data[:, 0], data[:, 1], slots, k_scale=k_scale, v_scale=v_scale,
                     backend=backend)  # fmt: skip
            results.append((data, scales))
    (got, got_scales), (want, want_scales) = results
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.float()[~nan], want.float()[~nan])
    if want_scales is not None and got_scales is not None:
        torch.testing.assert_close(got_scales, want_scales, rtol=0, atol=0, equal_nan=True)


def test_write_kv_refuses_a_slot_outside_and_writes_nothing() -> None:
    pool = torch.zeros(2, 1, 4, 8)
    for bad in (8, -2):
        with pytest.raises(InvalidRequest, match=f"slot {bad}"):
            write_kv(torch.ones(2, 1, 8), torch.ones(2, 1, 8), pool, pool, torch.tensor([0, bad]), backend="native")
    assert not pool.any()


def test_b60_pools_and_rows_of_any_stride() -> None:
    base = paged_case([300, 40], [5, 1], heads=6, kv_heads=3, head_dim=64)
    want = base.attend("native")
    head_major = torch.empty(3, *base.k_pool.shape[:1], 16, 64).copy_(base.k_pool.transpose(0, 1)).transpose(0, 1)
    wide = torch.full((*base.v_pool.shape[:3], 96), float("nan"))
    wide[..., 16:80] = base.v_pool
    rows = torch.randn(6, 6, 128)[..., 32:96].copy_(base.q)
    strided = dataclasses.replace(base, q=rows, k_pool=head_major, v_pool=wide[..., 16:80])
    assert not head_major.is_contiguous()
    assert torch.equal(strided.attend("native"), want)
    heads = dataclasses.replace(base, q=base.q[:, 2:4], k_pool=base.k_pool[:, 1:2], v_pool=base.v_pool[:, 1:2])
    assert torch.equal(heads.attend("native"), want[:, 2:4])
    sparse = torch.zeros(*base.k_pool.shape[:3], 128)[..., ::2]
    with pytest.raises(InvalidRequest, match="dense last dimension"):
        dataclasses.replace(base, k_pool=sparse, v_pool=sparse).attend("native")


def test_b59_garbage_after_the_used_part_and_bad_ids_within_it() -> None:
    case = paged_case([32, 48], block_size=16)  # whole blocks; the tables go on with garbage
    assert case.error("native") < 5e-6
    table = case.batch.block_table.clone()
    table[1, 1] = case.k_pool.shape[0]
    bad = dataclasses.replace(case, batch=dataclasses.replace(case.batch, block_table=table))
    with pytest.raises(InvalidRequest, match="sequence 1: block"):
        bad.attend("native")


def test_b59_blocks_before_the_window_may_be_gone() -> None:
    case = paged_case([300], window := [2], block_size=16)
    table = case.batch.block_table.clone()
    table[0, :10] = -1  # positions 0..159; a window of 100 needs 199..299
    gone = dataclasses.replace(case, batch=dataclasses.replace(case.batch, block_table=table))
    assert window == [2]
    assert torch.equal(gone.attend("native", window=100), case.attend("native", window=100))


def test_b56_empty_rows_and_queries_longer_than_keys() -> None:
    case = paged_case([0, 1, 5, 300], [0, 1, 5, 1])
    assert case.error("native") < 5e-6
    batch = dataclasses.replace(case.batch, seq_lens=torch.tensor([0, 0, 3, 0], dtype=torch.int32))
    out = dataclasses.replace(case, batch=batch).attend("native", sinks=torch.zeros(4))
    assert out.isfinite().all()
    empty = [0, 1, 2, 6]  # two of the five queries of the third sequence lie before its first key
    assert not out[empty].any()
    assert out[[3, 4, 5]].any(-1).all()


@pytest.mark.parametrize("isa", ISAS)
def test_b61_a_needle_is_found_at_every_border(isa: str) -> None:
    length, head_dim = 4500, 32
    with forced(isa):
        for block_size in (16, 64, 128, 256):
            num_blocks = -(-length // block_size)
            case = paged_case([length], heads=1, kv_heads=1, head_dim=head_dim, block_size=block_size)
            k = torch.zeros(length, 1, head_dim)
            v = torch.zeros(length, 1, head_dim)
            table = torch.tensor(case.tables[0])
            at = torch.arange(length)
            slots = table[at // block_size] * block_size + at % block_size
            case.q.zero_()[..., 0] = 8.0
            for border in {0, 63, 64, 255, 256, 4095, 4096, length - 1, block_size - 1, block_size,
                           (num_blocks - 1) * block_size}:  # fmt: skip
                k.zero_()[border, 0, 0] = 40.0
                v.zero_()[border, 0, 1] = 1.0
                write_kv(k, v, case.k_pool, case.v_pool, slots, backend="native")
                out = case.attend("native", scale=1.0)
                assert out[0, 0, 1].item() == pytest.approx(1.0), (block_size, border)


def test_b54_a_pool_beyond_two_to_the_31_elements() -> None:
    # 8.6 GB of address space that is never touched but for a few blocks at its end
    num_blocks, block_size, kv_heads, head_dim = 8300, 256, 8, 128
    pool = torch.empty(num_blocks, 2, kv_heads, block_size, head_dim, dtype=torch.bfloat16)
    assert pool[:, 0].stride(0) * num_blocks > 2**31
    small = paged_case([300, 20], heads=8, kv_heads=8, head_dim=128, block_size=256, dtype=torch.bfloat16)
    offset = num_blocks - small.k_pool.shape[0]
    pool[offset:, 0] = small.k_pool
    pool[offset:, 1] = small.v_pool
    table = torch.tensor([[b + offset for b in row] + [0] * (2 - len(row)) for row in small.tables], dtype=torch.int32)
    batch = dataclasses.replace(small.batch, block_table=table)
    big = dataclasses.replace(small, k_pool=pool[:, 0], v_pool=pool[:, 1], batch=batch)
    assert torch.equal(big.attend("native"), small.attend("native"))
    k = torch.randn(1, kv_heads, head_dim).bfloat16()
    slot = num_blocks * block_size - 1
    write_kv(k, k, pool[:, 0], pool[:, 1], torch.tensor([slot]), backend="native")
    assert torch.equal(pool[-1, 0, :, -1], k[0])


@pytest.mark.parametrize("pool", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_b62_outliers_stay_within_the_formats_error(pool: torch.dtype) -> None:
    case = paged_case([600], heads=4, kv_heads=2, head_dim=64, pool_dtype=torch.float32)
    case.k_pool[..., 3] *= 50.0
    data = torch.zeros_like(torch.stack([case.k_pool, case.v_pool], 1)).to(pool)
    scales = torch.zeros(data.shape[:-1])
    at = torch.arange(600)
    table = torch.tensor(case.tables[0])
    slots = table[at // 16] * 16 + at % 16
    k = case.k_pool[slots // 16, :, slots % 16]
    v = case.v_pool[slots // 16, :, slots % 16]
    write_kv(k, v, data[:, 0], data[:, 1], slots, k_scale=scales[:, 0], v_scale=scales[:, 1], backend="native")
    q = case.q * 0.1  # scores that do not single out one slot
    small = dataclasses.replace(case, q=q, k_pool=data[:, 0], v_pool=data[:, 1], k_scale=scales[:, 0],
                                v_scale=scales[:, 1])  # fmt: skip
    got, want = small.attend("native"), dataclasses.replace(case, q=q).expected()
    assert ((got - want).norm() / want.norm()).item() < 0.25
    assert small.error("native") < 2e-2  # against the same stored numbers: the kernel adds nothing to the format
