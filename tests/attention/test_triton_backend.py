"""When the Triton backend is there, what it refuses, and how it cuts up its launches."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from paged_case import paged_case

from pagedkv.attention import triton_backend
from pagedkv.attention.backend import choose
from pagedkv.attention.decode import paged_decode_attention
from pagedkv.attention.dispatch import paged_attention
from pagedkv.attention.tiling import (
    MAX_SPLITS,
    Gpu,
    decode_tiling,
    merge_heads,
    num_splits,
    prefill_tiling,
    shared_tiling,
)
from pagedkv.attention.triton_backend import TritonAttention
from pagedkv.errors import BackendUnavailable, InvalidRequest

H200 = Gpu(num_multiprocessors=132, capability=90)


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "interpreted", lambda: False)
    with pytest.raises(BackendUnavailable, match="needs a GPU, and the device here is cpu"):
        TritonAttention("cpu")


def test_without_triton_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pagedkv.attention.triton_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BackendUnavailable, match="needs the package triton"):
        importlib.import_module("pagedkv.attention.triton_backend")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(BackendUnavailable, match="torch finds none"):
        choose("triton", "cuda")


def test_auto_is_not_triton_on_a_cpu() -> None:
    assert choose("auto", "cpu").name != "triton"
    assert choose("triton", "cpu").name == "triton"  # in the interpreter


def test_the_chapters_call() -> None:
    case = paged_case([1, 40, 17], block_size=8)
    table, lengths = case.batch.block_table, case.batch.seq_lens
    got = paged_decode_attention(case.q, case.k_pool, case.v_pool, table, lengths, 8, backend="triton")
    torch.testing.assert_close(got.double(), case.expected(), atol=2e-6, rtol=0)


def test_b59_a_length_beyond_the_table_is_refused_on_the_host() -> None:
    case = paged_case([8, 3], block_size=4)
    table = case.batch.block_table[:, :1]
    with pytest.raises(InvalidRequest, match="table of 1 blocks"):
        paged_decode_attention(case.q, case.k_pool, case.v_pool, table, case.batch.seq_lens, 4, backend="triton")


def test_b59_what_stands_behind_the_used_part_of_a_table_changes_nothing() -> None:
    """Lengths at exact multiples of the block, with ids of another sequence, of no block and negative ones behind."""
    case = paged_case([8, 12, 4], block_size=4)
    expected = case.expected()
    for filler in (-1, 2**31 - 1, case.k_pool.shape[0], case.tables[1][0]):
        for seq, table in enumerate(case.tables):
            case.batch.block_table[seq, len(table) :] = filler
        torch.testing.assert_close(case.attend(TritonAttention("cpu")).double(), expected, atol=2e-6, rtol=0)


def test_what_the_kernels_do_not_take_is_refused_before_a_launch() -> None:
    case = paged_case([3])
    with pytest.raises(InvalidRequest, match="float64"):
        paged_attention(case.q.double(), case.k_pool, case.v_pool, case.batch, scale=1.0, backend="triton")
    wide = paged_case([3], head_dim=264)
    with pytest.raises(InvalidRequest, match="head_dim is 264; the Triton kernels take at most 256"):
        wide.attend("triton")
    with pytest.raises(InvalidRequest, match="int16"):
        paged_attention(case.q, case.k_pool.short(), case.v_pool.short(), case.batch, scale=1.0, backend="triton")


def test_no_tokens_is_no_launch() -> None:
    case = paged_case([3, 0], [0, 0])
    assert case.attend("triton").shape == (0, 4, 32)


def test_splits_fill_the_card_and_no_more() -> None:
    assert num_splits(64 * 8, 8192, 64, 132) == 1  # 512 programs fill 132 multiprocessors
    assert num_splits(1, 64, 64, 132) == 1  # one tile cannot be split
    lone = num_splits(8, 32768, 64, 132)  # one sequence, 8 KV heads
    assert 16 <= lone <= 33
    assert num_splits(1, 1 << 20, 64, 132) == MAX_SPLITS
    assert num_splits(0, 0, 64, 0) == 1
    for programs in (1, 3, 8, 40, 200, 1000):
        for span in (1, 63, 64, 65, 1000, 8192, 100_000):
            splits = num_splits(programs, span, 64, 132)
            assert 1 <= splits <= min(MAX_SPLITS, -(-span // 64))


@pytest.mark.parametrize("gpu", [H200, Gpu(108, 80), Gpu(304, 0)])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 64])
def test_a_tile_takes_the_whole_group(gpu: Gpu, head_dim: int, group: int) -> None:
    for compute_bytes in (2, 4):
        decode = decode_tiling(gpu, group, head_dim, compute_bytes, False)
        assert decode.rows >= group
        for tokens in (1, 5, 512):
            for tiling in (
                prefill_tiling(gpu, group, head_dim, compute_bytes, True, tokens),
                shared_tiling(gpu, group, head_dim, compute_bytes, True, tokens),
            ):
                assert tiling.rows >= max(group, 16)
                assert tiling.rows & (tiling.rows - 1) == 0


def test_short_chunks_take_small_tiles() -> None:
    assert prefill_tiling(H200, 4, 128, 2, False, 2).rows == 16
    assert prefill_tiling(H200, 4, 128, 2, False, 512).rows == 128


def test_the_merge_uses_the_card() -> None:
    assert merge_heads(1, 32, 128, 132) == 1  # 32 rows are not enough for 132 multiprocessors
    assert merge_heads(4096, 32, 128, 132) == 16
    assert merge_heads(4096, 3, 16, 132) == 4
