"""The oracle itself, against torch's own dense attention and against arithmetic done by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from paged_case import paged_case

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.decode import paged_decode_attention
from pagedkv.attention.dispatch import paged_attention, write_kv
from pagedkv.attention.reference import gather, quantise
from pagedkv.errors import InvalidRequest


@pytest.mark.parametrize("window", [None, 1, 7])
def test_reference_is_dense_attention_through_a_table(window: int | None) -> None:
    case = paged_case([9, 22, 1], [9, 5, 1], heads=6, kv_heads=2, block_size=4)
    out = case.attend("reference", window=window)
    for row, length in enumerate(case.batch.seq_lens.tolist()):
        first, last = case.batch.query_start[row : row + 2].tolist()
        blocks = torch.tensor(case.tables[row])
        k, v = gather(case.k_pool, blocks, length), gather(case.v_pool, blocks, length)
        positions = torch.arange(length - (last - first), length)[:, None]
        slots = torch.arange(length)[None]
        seen = (slots <= positions) & (slots > positions - (window or length))
        q = case.q[first:last].transpose(0, 1)
        want = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, enable_gqa=True)[0]
        torch.testing.assert_close(out[first:last], want.transpose(0, 1))


def test_softcap_and_sinks_by_hand() -> None:
    k_pool = torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1)
    v_pool = torch.tensor([10.0, 20.0]).reshape(1, 1, 2, 1)
    batch = AttentionBatch.build([[0]], [2], [1], 2)
    out = paged_attention(torch.tensor([[[2.0]]]), k_pool, v_pool, batch, scale=0.5, softcap=2.0,
                          sinks=torch.tensor([0.25]), backend="reference")  # fmt: skip
    weights = [math.exp(2 * math.tanh(score / 2)) for score in (1.0, 3.0)]
    want = (10 * weights[0] + 20 * weights[1]) / (sum(weights) + math.exp(0.25))
    assert out.item() == pytest.approx(want, rel=1e-6)


def test_b56_nothing_to_attend_to_gives_zeros() -> None:
    case = paged_case([5, 1])
    lengths = torch.tensor([0, 1], dtype=torch.int32)
    out = paged_decode_attention(case.q, case.k_pool, case.v_pool, case.batch.block_table, lengths, 16,
                                 backend="reference")  # fmt: skip
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out.isfinite().all()


def test_b59_a_length_beyond_the_table_is_refused_on_the_host() -> None:
    case = paged_case([5])
    table = case.batch.block_table[:, :1]
    for length in (17, -1):
        with pytest.raises(InvalidRequest, match="lengths") as caught:
            paged_decode_attention(case.q, case.k_pool, case.v_pool, table, torch.tensor([length]), 16)
        assert caught.value.field == "lengths"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_rows_keep_their_largest_value_and_saturate(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, -4.0, 0.5], [0.0, 0.0, 0.0], [1e-40, 0.0, 0.0], [float("inf"), 1.0, -1e30]])
    stored, scale = quantise(rows, dtype)
    assert scale is not None
    back = stored.float() * scale[:, None]
    assert back[0, 1].item() == pytest.approx(-4.0)
    assert torch.equal(back[1:3], torch.zeros(2, 3))
    assert back[3].isfinite().all()
    assert back[3, 0] > 3e38
    _, scale = quantise(torch.tensor([[float("nan"), 1.0]]), dtype)
    assert scale is not None
    assert scale.isnan().all()  # not hidden


def test_wrong_shapes_are_refused_by_name() -> None:
    case = paged_case([5])
    good = {"q": case.q, "k_pool": case.k_pool, "v_pool": case.v_pool, "batch": case.batch, "scale": 1.0}
    wrong = [
        ("q", {"q": case.q[:, :3]}),
        ("q", {"q": torch.cat([case.q, case.q])}),
        ("k_pool", {"v_pool": case.v_pool.half()}),
        ("window", {"window": 0}),
        ("softcap", {"softcap": 0.0}),
        ("sinks", {"sinks": torch.zeros(3)}),
        ("out", {"out": torch.zeros(1)}),
        ("k_scale", {"k_scale": torch.zeros(1), "v_scale": torch.zeros(1)}),
    ]
    for field, change in wrong:
        with pytest.raises(InvalidRequest) as caught:
            paged_attention(**{**good, **change})  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="slot"):
        write_kv(torch.zeros(1, 2, 32), torch.zeros(1, 2, 32), case.k_pool, case.v_pool, torch.tensor([10**6]),
                 backend="reference")  # fmt: skip
