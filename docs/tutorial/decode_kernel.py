"""A plain paged decode kernel, to be read before src/pagedkv/attention/triton_decode.py.

    TRITON_INTERPRET=1 python docs/tutorial/decode_kernel.py      # runs on any CPU; without the variable, on a GPU

One program per (sequence, query head). It walks its sequence's block table, one block at a time, and keeps three
things: the largest score so far, the sum of the weights, and the weighted sum of the values. docs/tutorial/
decode_kernel.md tells the story around it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def plain_decode_kernel(
    out, q, k_pool, v_pool, block_tables, lengths, table_width, k_strides, v_strides, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Grid (B, NUM_HEADS). SLOTS and DIMS are BLOCK_SIZE and HEAD_DIM rounded up to powers of two."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // GROUP  # several query heads read the same KV head
    length = tl.load(lengths + seq)

    slots = tl.arange(0, SLOTS)
    dims = tl.arange(0, DIMS)
    query = tl.load(q + (seq * NUM_HEADS + head) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)

    largest = float("-inf")  # score so far
    total = 0.0  # of the weights exp(score - largest)
    values = tl.zeros([DIMS], tl.float32)  # weighted sum of V
    for logical_block in range(0, tl.cdiv(length, BLOCK_SIZE)):
        # the one indirection of paged attention: logical block -> physical block. 64 bits, for pools past 2^31 elements
        block = tl.load(block_tables + seq * table_width + logical_block).to(tl.int64)
        written = (slots < BLOCK_SIZE) & (
            logical_block * BLOCK_SIZE + slots < length
        )  # the tail of the last block is not
        mask = written[:, None] & (dims < HEAD_DIM)[None, :]
        k_at = (
            block * k_strides[0] + kv_head * k_strides[1] + slots[:, None] * k_strides[2] + dims[None, :] * k_strides[3]
        )
        v_at = (
            block * v_strides[0] + kv_head * v_strides[1] + slots[:, None] * v_strides[2] + dims[None, :] * v_strides[3]
        )
        k = tl.load(k_pool + k_at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_pool + v_at, mask=mask, other=0.0).to(tl.float32)

        scores = tl.where(written, tl.sum(k * query[None, :], axis=1) * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=0))
        fade = tl.exp(largest - new_largest)  # what was summed so far was measured against the old largest score
        weights = tl.exp(scores - new_largest)
        total = total * fade + tl.sum(weights, axis=0)
        values = values * fade + tl.sum(weights[:, None] * v, axis=0)
        largest = new_largest

    result = values / tl.where(total == 0.0, 1.0, total)  # an empty sequence gives zeros
    tl.store(out + (seq * NUM_HEADS + head) * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def plain_decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """q [B, Hq, D] contiguous, pools [N, Hkv, block_size, D], block_tables int32 [B, W], lengths int32 [B]."""
    out = torch.empty_like(q)
    num_seqs, num_heads, head_dim = q.shape
    plain_decode_kernel[(num_seqs, num_heads)](
        out, q, k_pool, v_pool, block_tables, lengths, block_tables.shape[1], k_pool.stride(), v_pool.stride(),
        head_dim**-0.5, NUM_HEADS=num_heads, GROUP=num_heads // k_pool.shape[1], BLOCK_SIZE=block_size,
        SLOTS=triton.next_power_of_2(block_size), HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return out


def main() -> None:
    """Two sequences whose blocks lie scattered over a pool, against softmax over a gathered copy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    pool = torch.randn(2, 9, 2, 4, 32, device=device)  # K and V of 9 blocks, 2 KV heads, 4 slots, 32 dimensions
    tables = torch.tensor([[5, 1, 7], [2, 8, 0]], dtype=torch.int32, device=device)
    lengths = torch.tensor([10, 6], dtype=torch.int32, device=device)
    q = torch.randn(2, 4, 32, device=device)
    got = plain_decode_attention(q, pool[0], pool[1], tables, lengths, 4)
    for seq, length in enumerate(lengths.tolist()):
        k, v = (part[tables[seq].long()].transpose(0, 1).reshape(2, 12, 32)[:, :length] for part in pool)
        k, v = (part.repeat_interleave(2, dim=0) for part in (k, v))  # query heads 0 and 1 read KV head 0
        weights = torch.softmax(torch.einsum("hd,hnd->hn", q[seq], k) * 32**-0.5, -1)
        error = (got[seq] - torch.einsum("hn,hnd->hd", weights, v)).abs().max().item()
        print(f"sequence {seq}: {length} tokens in blocks {tables[seq].tolist()}, largest difference {error:.1e}")


if __name__ == "__main__":
    main()
