"""Every GPU kernel against the float64 reference: fresh inputs, poisoned outputs and slots, scrambled tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.dispatch import paged_attention, write_kv
from pagedkv.attention.shared_prefix import PrefixGroup, SharedPrefixes
from pagedkv.attention.triton_backend import TritonAttention
from pagedkv.attention.triton_copy import copy_blocks

POOLS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.int8,
         "fp8": torch.float8_e4m3fn}  # fmt: skip
ALLOWED = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # values up to about 4, rounded to the dtype


@dataclass(frozen=True)
class Spec:
    """One call. shared: leading blocks that all sequences have in common and that are read once for all."""

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    pool: str = "bf16"
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    shared: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the model: the pool's, or bf16 over a quantised pool."""
        return {"fp32": torch.float32, "fp16": torch.float16}.get(self.pool, torch.bfloat16)


def specs(small: bool) -> Iterator[Spec]:
    """small: each kind of call once, on shapes that the interpreter runs in seconds."""
    decode = Spec("decode", (0, 1, 16, 17, 300, 1025), (0, 1, 1, 1, 1, 1))
    mixed = Spec("mixed", (300, 1, 40, 17, 0, 700), (1, 1, 40, 5, 0, 130))
    shared = Spec("shared prefix", (200, 129, 300, 144), (1, 1, 1, 1), shared=8)
    if small:
        decode = replace(decode, seq_lens=(0, 1, 17, 70), query_lens=(0, 1, 1, 1), kv_heads=1)
        mixed = replace(mixed, seq_lens=(40, 10, 17), query_lens=(1, 10, 3), kv_heads=1)
        shared = replace(shared, seq_lens=(40, 33, 50), query_lens=(1, 1, 1), shared=2, kv_heads=1)
        yield from (replace(decode, name=f"decode {pool}", pool=pool) for pool in ("fp16", "fp8"))
        yield replace(decode, name="decode group 3, block_size 1", group=3, block_size=1)
        yield replace(mixed, name="mixed int8 head_dim 80", pool="int8", head_dim=80)
        yield replace(mixed, name="mixed window softcap sinks", window=9, softcap=20.0, sinks=True)
        yield shared
        return
    for base in (decode, mixed):
        for pool in POOLS:
            yield replace(base, name=f"{base.name} {pool}", pool=pool)
        for group in (1, 3, 8):
            yield replace(base, name=f"{base.name} group {group}", group=group)
        for head_dim in (64, 80, 96, 256):
            yield replace(base, name=f"{base.name} head_dim {head_dim}", head_dim=head_dim)
        for block_size in (1, 48, 256):
            yield replace(base, name=f"{base.name} block_size {block_size}", block_size=block_size)
        yield replace(base, name=f"{base.name} window", window=30)
        yield replace(base, name=f"{base.name} softcap and sinks", softcap=20.0, sinks=True)
    yield shared
    yield replace(shared, name="shared prefix fp8 window", pool="fp8", window=90)


def check(spec: Spec, backend: TritonAttention, device: torch.device) -> float:
    """Largest difference from the reference over what rounding allows: right up to 1; infinite for a NaN."""
    counts = [-(-length // spec.block_size) for length in spec.seq_lens]
    num_blocks = sum(counts) + 6
    data = torch.full((num_blocks, 2, spec.kv_heads, spec.block_size, spec.head_dim), float("nan"), device=device)
    data = (torch.full_like(data, -128) if spec.pool == "int8" else data).to(POOLS[spec.pool])
    scales = torch.full(data.shape[:-1], float("nan"), device=device) if data.dtype.itemsize == 1 else None
    k_scale, v_scale = (None, None) if scales is None else (scales[:, 0], scales[:, 1])
    table, spare = _tables(spec, counts, num_blocks, device)
    slots = []
    for row, length in enumerate(spec.seq_lens):
        positions = torch.arange(length, device=device)
        slots.append(table[row].long()[positions // spec.block_size] * spec.block_size + positions % spec.block_size)
    slot_mapping = torch.cat(slots).unique()
    k, v = torch.randn(2, len(slot_mapping), spec.kv_heads, spec.head_dim, device=device).to(spec.dtype)
    write_kv(k, v, data[:, 0], data[:, 1], slot_mapping, k_scale=k_scale, v_scale=v_scale, backend=backend)
    copy_blocks(data, [(spare[0], spare[1]), (spare[0], spare[2])])  # nobody's blocks: the others must stay as they are
    heads = spec.kv_heads * spec.group
    q = torch.randn(sum(spec.query_lens), heads, spec.head_dim, device=device).to(spec.dtype)
    batch = make_batch(table, spec.seq_lens, spec.query_lens, spec.block_size)
    if spec.shared:
        everyone = PrefixGroup(tuple(range(len(counts))), spec.shared)
        batch.plans[SharedPrefixes] = SharedPrefixes.build([everyone], spec.block_size, device)
    sinks = torch.randn(heads, device=device) if spec.sinks else None

    def attend(queries: torch.Tensor, by: str | TritonAttention) -> torch.Tensor:
        return paged_attention(
            queries, data[:, 0], data[:, 1], batch, scale=spec.head_dim**-0.5, window=spec.window, softcap=spec.softcap,
            sinks=sinks, k_scale=k_scale, v_scale=v_scale, backend=by, out=torch.full_like(queries, float("nan")),
        )  # fmt: skip

    error = (attend(q, backend).double() - attend(q.double(), "reference")).abs().max().item() / ALLOWED[spec.dtype]
    return error if error == error else float("inf")


def _tables(spec: Spec, counts: list[int], num_blocks: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Scrambled tables with garbage behind their used part, and blocks that are in none."""
    ids = torch.randperm(num_blocks, device=device).to(torch.int32)
    table = torch.full((len(counts), max(counts) + 2), 2**31 - 1, dtype=torch.int32, device=device)
    used = spec.shared
    for row, count in enumerate(counts):
        own = max(0, count - spec.shared)
        table[row, :count] = torch.cat([ids[: min(count, spec.shared)], ids[used : used + own]])
        used += own
    return table, ids[used : used + 3].tolist()


def make_batch(
    table: torch.Tensor, seq_lens: tuple[int, ...], query_lens: tuple[int, ...], block_size: int
) -> AttentionBatch:
    """A batch whose KV is in the pool already."""
    num_tokens = sum(query_lens)
    return AttentionBatch(
        query_start=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(table.device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=table.device),
        block_table=table,
        slot_mapping=torch.full((num_tokens,), -1, device=table.device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=table.device),
        block_size=block_size,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
