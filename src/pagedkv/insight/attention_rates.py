"""How fast attention is on this CPU, against the memory's speed and against torch, measured in the same rounds.

A1 decode: bytes of K and V a second, over the rate at which the same threads merely read the same pool; and torch's
   scaled_dot_product_attention on contiguous K and V of the same sizes. Calls go through as many layers as it takes to
   exceed a last-level cache three times, so K and V come from memory as in a decode step.
A2 prefill: against torch's, causal, one sequence.
A3 decode of sequences with a long common prefix, its blocks shared against each with its own copy.

Every case is checked before it is timed: against a float64 softmax for A1, for equal bits of shared and plain for A3.
Rounds alternate between what is compared; figures are medians over rounds with the spread (10th to 90th percentile).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.dispatch import paged_attention
from pagedkv.attention.native import extension
from pagedkv.cache.pool import KVPool

WORKING_SET = 100 << 20  # bytes of K and V that a round reads: three times a last-level cache of 32 MiB
LARGEST_ERROR = 2e-2  # against float64: bf16 products round the query and the weights to 8 bits


@dataclass(frozen=True)
class DecodeCase:
    batch: int
    context: int
    head_dim: int
    group: int
    kv_heads: int = 4
    block_size: int = 16
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class Rate:
    """One line of figures. ms: of one call; gb_s: K and V; share: of the streaming rate; torch_ms: of SDPA."""

    name: str
    ms: float
    spread_ms: tuple[float, float]
    gb_s: float | None = None
    stream_gb_s: float | None = None
    share: float | None = None
    torch_ms: float | None = None
    times: float | None = None  # how many times faster than what it is compared with

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def decode_cases(quick: bool) -> Iterator[DecodeCase]:
    for head_dim in (64, 128):
        for group in (1, 3, 4, 8):
            yield DecodeCase(8, 2048, head_dim, group)
    if quick:
        return
    for batch, context in ((1, 512), (1, 2048), (1, 8192), (8, 512), (8, 8192), (32, 512), (32, 2048)):
        for head_dim, group in ((64, 3), (128, 4)):
            yield DecodeCase(batch, context, head_dim, group)
    for block_size in (8, 32, 64, 128):
        yield DecodeCase(8, 2048, 64, 3, block_size=block_size)
        yield DecodeCase(8, 2048, 128, 4, block_size=block_size)


def quantised_cases() -> Iterator[DecodeCase]:
    for kv_cache_dtype in ("int8_per_token_head", "fp8_e4m3"):
        for head_dim, group in ((64, 1), (64, 3), (128, 4)):
            yield DecodeCase(8, 2048, head_dim, group, kv_cache_dtype=kv_cache_dtype)


def decode_rate(case: DecodeCase, rounds: int, against_torch: bool = True) -> Rate:
    """A1."""
    blocks = -(-case.context // case.block_size)
    per_layer = 2 * case.batch * case.context * case.kv_heads * case.head_dim * 2
    layers = max(1, math.ceil(WORKING_SET / per_layer))
    pool = _filled_pool(case, case.batch * blocks, layers)
    batch = _scattered_batch(case.batch, case.context, blocks, case.block_size)
    q = torch.randn(case.batch, case.kv_heads * case.group, case.head_dim).bfloat16()
    out = torch.empty_like(q)

    def ours(layer: int) -> torch.Tensor:
        return _attend(q, pool, layer, batch, out)

    _check(ours(0), paged_attention(q.double(), pool.k_pool[0], pool.v_pool[0], batch, scale=case.head_dim**-0.5,
                                    k_scale=pool.k_scale[0], v_scale=pool.v_scale[0], backend="reference"))  # fmt: skip
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: [ours(layer) for layer in range(layers)],
        "stream": lambda: extension().read_stream(pool.data.data_ptr(), pool.data.nbytes),
    }
    if against_torch:
        shape = (layers, case.batch, case.kv_heads, case.context, case.head_dim)
        k, v = torch.randn(shape, dtype=torch.bfloat16), torch.randn(shape, dtype=torch.bfloat16)
        runs["torch"] = lambda: [
            F.scaled_dot_product_attention(q[:, :, None], k[layer], v[layer], enable_gqa=True)
            for layer in range(layers)
        ]
    seconds = _alternate(runs, rounds)
    mine = statistics.median(seconds["ours"])
    stream = pool.data.nbytes / statistics.median(seconds["stream"])
    name = (
        f"batch {case.batch}, context {case.context}, head_dim {case.head_dim}, group {case.group}, "
        f"block {case.block_size}, {'bf16' if case.kv_cache_dtype == 'auto' else case.kv_cache_dtype}"
    )
    theirs = statistics.median(seconds["torch"]) / layers * 1e3 if against_torch else None
    return Rate(
        name=name,
        ms=mine / layers * 1e3,
        spread_ms=_spread(seconds["ours"], layers),
        gb_s=pool.nbytes / mine / 1e9,
        stream_gb_s=stream / 1e9,
        share=pool.nbytes / mine / stream,
        torch_ms=theirs,
        times=None if theirs is None else theirs / (mine / layers * 1e3),
    )


def prefill_rate(tokens: int, head_dim: int, heads: int, kv_heads: int, rounds: int) -> Rate:
    """A2."""
    case = DecodeCase(1, tokens, head_dim, heads // kv_heads, kv_heads)
    pool = _filled_pool(case, tokens // 16, 1)
    table = torch.randperm(tokens // 16).tolist()
    batch = AttentionBatch.build([table], [tokens], [tokens], 16)
    q = torch.randn(tokens, heads, head_dim).bfloat16()
    out = torch.empty_like(q)
    shape = (1, kv_heads, tokens, head_dim)
    k, v = (side[0][table].transpose(0, 1).reshape(shape).contiguous() for side in (pool.k_pool, pool.v_pool))
    dense = q.transpose(0, 1)[None].contiguous()

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(dense, k, v, is_causal=True, enable_gqa=True)

    _check(_attend(q, pool, 0, batch, out), theirs()[0].transpose(0, 1))
    seconds = _alternate({"ours": lambda: _attend(q, pool, 0, batch, out), "torch": theirs}, rounds)
    mine, other = statistics.median(seconds["ours"]), statistics.median(seconds["torch"])
    name = f"prefill {tokens} tokens, head_dim {head_dim}, {heads} heads, {kv_heads} KV heads"
    return Rate(name, mine * 1e3, _spread(seconds["ours"], 1), torch_ms=other * 1e3, times=other / mine)


def shared_prefix_rate(
    head_dim: int, group: int, kv_heads: int, rounds: int, *, batch: int = 32, shared: int = 4096, own: int = 32
) -> Rate:
    """A3. ``ms`` is of the shared call, ``times`` how much longer the plain one takes."""
    blocks = (shared + own) // 16
    case = DecodeCase(batch, shared + own, head_dim, group, kv_heads)
    pool = _filled_pool(case, batch * blocks, 1)
    tables = torch.randperm(batch * blocks).reshape(batch, blocks).tolist()
    common = [tables[0][: shared // 16] + table[shared // 16 :] for table in tables]
    for table in tables[1:]:
        pool.data[table[: shared // 16]] = pool.data[tables[0][: shared // 16]]
    plain, together = (AttentionBatch.build(t, [shared + own] * batch, [1] * batch, 16) for t in (tables, common))
    q = torch.randn(batch, kv_heads * group, head_dim).bfloat16()
    out = torch.empty_like(q)
    if not torch.equal(_attend(q, pool, 0, plain, out).clone(), _attend(q, pool, 0, together, out)):
        raise AssertionError("shared and plain results differ")
    seconds = _alternate(
        {"shared": lambda: _attend(q, pool, 0, together, out), "plain": lambda: _attend(q, pool, 0, plain, out)}, rounds
    )
    mine, other = statistics.median(seconds["shared"]), statistics.median(seconds["plain"])
    name = f"{batch} sequences, {shared} shared and {own} own, head_dim {head_dim}, group {group}, {kv_heads} KV heads"
    return Rate(name, mine * 1e3, _spread(seconds["shared"], 1), times=other / mine)


def _filled_pool(case: DecodeCase, num_blocks: int, layers: int) -> KVPool:
    pool = KVPool(num_blocks, layers, case.kv_heads, case.block_size, case.head_dim, dtype=torch.bfloat16,
                  kv_cache_dtype=case.kv_cache_dtype)  # fmt: skip
    if pool.scales is None:
        pool.data.normal_()
    else:
        for block in pool.data:
            block.copy_((torch.randn(block.shape) * 30).clamp_(-110, 110))
        pool.scales.fill_(1 / 64)
    return pool


def _scattered_batch(num_seqs: int, context: int, blocks: int, block_size: int) -> AttentionBatch:
    tables = torch.randperm(num_seqs * blocks).reshape(num_seqs, blocks).tolist()
    return AttentionBatch.build(tables, [context] * num_seqs, [1] * num_seqs, block_size)


def _attend(q: torch.Tensor, pool: KVPool, layer: int, batch: AttentionBatch, out: torch.Tensor) -> torch.Tensor:
    return paged_attention(q, pool.k_pool[layer], pool.v_pool[layer], batch, scale=q.shape[-1] ** -0.5,
                           k_scale=pool.k_scale[layer], v_scale=pool.v_scale[layer], backend="native",
                           out=out)  # fmt: skip


def _check(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double() - want.double()).abs().max().item() / max(1.0, want.double().abs().max().item())
    if not error < LARGEST_ERROR:
        raise AssertionError(f"the largest error is {error:.3g}; at most {LARGEST_ERROR} was expected")


def _alternate(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}  # the first round warms up


def _spread(seconds: list[float], calls: int) -> tuple[float, float]:
    ordered = sorted(seconds)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return low / calls * 1e3, high / calls * 1e3
