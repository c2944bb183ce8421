"""One order of reduction: however a token is computed, and with whom, its result has the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from native_isa import ISAS, NATIVE, forced
from paged_case import PagedCase, paged_case

from pagedkv.attention.batch import AttentionBatch

FEATURES: list[dict[str, Any]] = [{}, {"window": 300}, {"softcap": 4.0, "sinks": torch.linspace(-1, 2, 6)}]


@pytest.fixture(autouse=True)
def _restore_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def computed(case: PagedCase, parts: list[tuple[int, int]], threads: int, **features: Any) -> torch.Tensor:
    """Rows of the one sequence of ``case``, its tokens [a, b) of each part in a call of their own."""
    torch.set_num_threads(threads)
    outs = []
    for first, last in parts:
        batch = AttentionBatch.build(case.tables, [last], [last - first], case.batch.block_size)
        outs.append(dataclasses.replace(case, q=case.q[first:last], batch=batch).attend("native", **features))
    return torch.cat(outs)


@pytest.mark.parametrize("features", FEATURES, ids=["plain", "window", "softcap-sinks"])
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_decode_prefill_and_chunks_give_the_same_bits(isa: str, pool: torch.dtype, features: dict[str, Any]) -> None:
    length = 777
    case = paged_case([length], [length], heads=6, kv_heads=2, head_dim=40, pool_dtype=pool, block_size=16)
    positions = {*range(0, length, 31), 63, 64, 65, 255, 256, 511, 512, length - 1}
    with forced(isa):
        whole = computed(case, [(0, length)], 1, **features)
        chunks = [(0, 1), (1, 64), (64, 256), (256, 257), (257, 700), (700, length)]
        assert torch.equal(computed(case, chunks, 1, **features), whole)
        assert torch.equal(computed(case, chunks, 2, **features), whole)
        assert torch.equal(computed(case, [(0, length)], 2, **features), whole)
        for position in positions:
            for threads in (1, 2):
                row = computed(case, [(position, position + 1)], threads, **features)
                assert torch.equal(row[0], whole[position]), position


@pytest.mark.parametrize("isa", ISAS)
def test_company_and_place_do_not_matter(isa: str) -> None:
    """Block size, the order of blocks, neighbours in the batch: the same bits."""
    tokens = 600
    lone = paged_case([tokens], [tokens], heads=3, kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16)
    with forced(isa):
        want = lone.attend("native")[-1]
        k = torch.stack([lone.k_pool[lone.tables[0][p // 16], :, p % 16] for p in range(tokens)])
        v = torch.stack([lone.v_pool[lone.tables[0][p // 16], :, p % 16] for p in range(tokens)])
        for block_size in (1, 7, 48, 256):
            seq_lens = [333, tokens, 5, 900]
            mixed = paged_case(seq_lens, [300, 1, 5, 1], heads=3, kv_heads=1, head_dim=64, block_size=block_size,
                               dtype=torch.bfloat16)  # fmt: skip
            for p in range(tokens):
                block = mixed.tables[1][p // block_size]
                mixed.k_pool[block, :, p % block_size] = k[p]
                mixed.v_pool[block, :, p % block_size] = v[p]
            row = int(mixed.batch.query_start[1])
            mixed.q[row] = lone.q[-1]
            assert torch.equal(mixed.attend("native")[row], want), block_size


@pytest.mark.parametrize("isa", ISAS)
def test_shared_prefixes_are_read_once_and_change_nothing(isa: str) -> None:
    shared, block_size = 40, 16  # 640 positions: two whole pieces and a half
    seq_lens = [shared * block_size + extra for extra in (1, 9, 300, 65)] + [600, 80]
    for query_lens in ([1] * 6, [1, 2, 1, 3, 1, 1]):
        case = paged_case(seq_lens, query_lens, heads=6, kv_heads=2, head_dim=32, shared=shared, block_size=block_size)
        with forced(isa):
            together = case.attend("native")
            for row, length in enumerate(seq_lens):
                first, last = case.batch.query_start[row : row + 2].tolist()
                batch = AttentionBatch.build([case.tables[row]], [length], [last - first], block_size)
                alone = dataclasses.replace(case, q=case.q[first:last], batch=batch).attend("native")
                assert torch.equal(together[first:last], alone), row
            assert case.error("native") < 5e-6


def test_the_plan_finds_what_is_shared() -> None:
    seq_lens = [1100, 1100, 1100, 700]
    case = paged_case(seq_lens, heads=2, kv_heads=2, shared=33, block_size=16)  # 528 positions: two pieces of 256
    plan = case.batch.plans
    case.attend("native")
    (found,) = plan.values()
    # the four share pieces 0 and 1 in one tile, and each has a tile of its own after that
    assert found.num_tiles == 5
    assert found.num_split_tokens == 4
    separate = paged_case(seq_lens, heads=2, kv_heads=2, block_size=16)
    separate.attend("native")
    (alone,) = separate.batch.plans.values()
    assert alone.num_tiles == 4
    assert NATIVE.piece == 256


@pytest.mark.parametrize("isa", ISAS)
def test_the_last_sequences_of_a_batch_are_cut_smaller_and_keep_their_bits(isa: str) -> None:
    torch.set_num_threads(2)
    case = paged_case([1300] * 8, heads=4, kv_heads=2, head_dim=32, dtype=torch.bfloat16, block_size=16)
    with forced(isa):
        together = case.attend("native")
        (plan,) = case.batch.plans.values()
        assert 0 < plan.num_split_tokens < 4  # the rest are whole: each one item with all its KV heads
        assert plan.num_items >= 8 + 4
        for row, table in enumerate(case.tables):
            batch = AttentionBatch.build([table], [1300], [1], 16)
            assert torch.equal(together[row : row + 1], dataclasses.replace(case, q=case.q[row : row + 1], batch=batch)
                               .attend("native")), row  # fmt: skip
