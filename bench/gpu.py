"""The GPU kernels checked and timed: one command, under five minutes.

    python bench/gpu.py                       on a GPU; JSON to bench/results/gpu.json
    python bench/gpu.py --interpret           on a CPU, in Triton's interpreter, on tiny shapes: proves the script
    python bench/gpu.py --only decode shared  some of: check, ceilings, decode, prefill, shared

1. Every kernel against the float64 reference: fresh inputs, outputs poisoned, tables scrambled, unused slots NaN.
2. The two ceilings, measured: a large device copy, a large bf16 matrix product.
3. Decode (batch x context x group x format), prefill, shared prefix: a CUDA graph of calls on rotating blocks, so that
   nothing is found in the L2 cache; the median of its replays, divided by the calls.
4. Achieved bytes/s and operations/s over the ceilings, beside torch's SDPA on contiguous K and V, and FlashInfer and
   vLLM where they can be imported (bench/gpu_peers.py). What must be moved and computed: bench/gpu_work.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpu_peers
import gpu_work
from gpu_check import POOLS, check, make_batch, specs
from gpu_work import HEAD_DIM, NUM_KV_HEADS, Work

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.dispatch import paged_attention
from pagedkv.attention.shared_prefix import PrefixGroup, SharedPrefixes
from pagedkv.attention.triton_backend import TritonAttention

BLOCK_SIZE = 16
NOT_IN_CACHE = 400_000_000  # bytes read before the same block is read again, several times an L2 cache
Call = Callable[[], Any]


@dataclass(frozen=True)
class Machine:
    """Where it runs and how large the shapes are."""

    device: torch.device
    interpreted: bool
    backend: TritonAttention

    @property
    def name(self) -> str:
        return "Triton's interpreter on a CPU" if self.interpreted else torch.cuda.get_device_name(self.device)

    def seconds(self, calls: list[Call], budget: float = 0.15) -> float:
        """Median seconds of one call. On a GPU the calls are one graph, replayed for ``budget`` seconds."""
        if self.interpreted:
            begin = time.perf_counter()
            calls[0]()
            return time.perf_counter() - begin
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        times: list[float] = []
        end = time.perf_counter() + budget
        while len(times) < 5 or (time.perf_counter() < end and len(times) < 500):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3 / len(calls))
        return statistics.median(times)


@dataclass
class Pool:
    """K, V and scales of many blocks, filled once; ``tables`` deals out blocks in scrambled or straight order."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    used: int = 0
    order: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def random(cls, num_blocks: int, dtype: torch.dtype, device: torch.device, head_dim: int = HEAD_DIM) -> Pool:
        """A block's K and V side by side, as a KVPool of one layer has them."""
        data = torch.empty((num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim), dtype=dtype, device=device)
        for start in range(0, num_blocks, 4096):  # a piece at a time: the float32 numbers are larger than the pool
            piece = data[start : start + 4096]
            noise = torch.randn(piece.shape, device=device)
            piece.copy_((noise * 40).clamp(-127, 127) if dtype == torch.int8 else noise)
        scales = torch.full(data.shape[:-1], 1 / 40, device=device) if dtype.itemsize == 1 else None
        k_scale, v_scale = (None, None) if scales is None else (scales[:, 0], scales[:, 1])
        return cls(data[:, 0], data[:, 1], k_scale, v_scale, order=torch.randperm(num_blocks, device=device))

    def tables(self, num_seqs: int, context: int, straight: bool = False) -> torch.Tensor:
        """[num_seqs, blocks] int32 of blocks that the last tables did not name, as long as there are such."""
        per_seq = -(-context // BLOCK_SIZE)
        count = num_seqs * per_seq
        if self.used + count > len(self.order):
            self.used = 0
        ids = self.order[self.used : self.used + count] if not straight else torch.arange(
            self.used, self.used + count, device=self.order.device)  # fmt: skip
        self.used += count
        return ids.to(torch.int32).view(num_seqs, per_seq)


def ceilings(machine: Machine) -> dict[str, float]:
    """bandwidth: bytes read plus bytes written by a copy, a second;  matmul: operations a second of a bf16 product."""
    size, side = (1 << 20, 64) if machine.interpreted else (4 << 30, 8192)
    source = torch.ones(size, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, side, side, device=machine.device).to(torch.bfloat16)
    product = torch.empty_like(a)
    return {
        "bandwidth": 2 * size / machine.seconds([lambda: target.copy_(source)]),
        "matmul": 2 * side**3 / machine.seconds([lambda: torch.mm(a, b, out=product)]),
    }


@dataclass(frozen=True)
class Timer:
    """Times calls and says what they reach of the ceilings."""

    machine: Machine
    ceiling: dict[str, float]

    def row(self, name: str, work: Work, calls: list[Call], peers: dict[str, list[Call]]) -> dict[str, Any]:
        seconds = self.machine.seconds(calls)
        row: dict[str, Any] = {
            "name": name,
            "us": seconds * 1e6,
            "bytes": work.num_bytes,
            "operations": work.operations,
        }
        if self.ceiling:
            row["of_bandwidth"] = work.num_bytes / seconds / self.ceiling["bandwidth"]
            row["of_matmul"] = work.operations / seconds / self.ceiling["matmul"]
        for peer, peer_calls in peers.items():
            try:
                row[f"{peer}_us"] = self.machine.seconds(peer_calls) * 1e6
            except Exception as error:  # a peer that fails here must not end the run; it is written down
                row[f"{peer}_error"] = repr(error)[:200]
        shown = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
        print(name, *(f"{key} {value}" for key, value in shown.items()), sep="  ", flush=True)
        return row


def attention_call(
    machine: Machine, pool: Pool, batch: AttentionBatch, group: int, out: torch.Tensor | None = None
) -> tuple[Call, torch.Tensor]:
    q = torch.randn(batch.num_tokens, NUM_KV_HEADS * group, HEAD_DIM, device=machine.device).to(torch.bfloat16)
    out = torch.empty_like(q) if out is None else out
    return lambda: paged_attention(q, pool.k, pool.v, batch, scale=HEAD_DIM**-0.5, k_scale=pool.k_scale,
                                   v_scale=pool.v_scale, backend=machine.backend, out=out), q  # fmt: skip


def decode_rows(timer: Timer) -> list[dict[str, Any]]:
    """Batch x context x group x format; at batch 64 and 8k also through tables in straight order."""
    small = timer.machine.interpreted
    shapes = [(2, 48)] if small else [(b, c) for b in gpu_work.BATCHES for c in gpu_work.CONTEXTS]
    most = max(num_seqs * context for num_seqs, context in shapes)
    rows = []
    for kind in ("bf16", "fp8"):
        pool = Pool.random(-(-most // BLOCK_SIZE) + 8, POOLS[kind], timer.machine.device)
        for num_seqs, context in shapes:
            num_bytes = gpu_work.decode_work(num_seqs, context, 1, kind).num_bytes
            turns = 1 if small else max(1, min(32, NOT_IN_CACHE // num_bytes, most // (num_seqs * context)))
            for group in (4,) if small else (1, 4, 8):
                for straight in (False, True) if (num_seqs, context, kind) == (64, 8192, "bf16") else (False,):
                    name = f"decode {kind} batch {num_seqs} context {context} group {group}" + " straight" * straight
                    tables = [pool.tables(num_seqs, context, straight) for _ in range(turns)]
                    batches = [make_batch(t, (context,) * num_seqs, (1,) * num_seqs, BLOCK_SIZE) for t in tables]
                    made = [attention_call(timer.machine, pool, batch, group) for batch in batches]
                    peers = {}
                    if kind == "bf16" and not straight:
                        peers = gpu_peers.decode(pool, [q for _, q in made], tables, context)
                    work = gpu_work.decode_work(num_seqs, context, group, kind)
                    rows.append(timer.row(name, work, [call for call, _ in made], peers))
    return rows


def prefill_rows(timer: Timer) -> list[dict[str, Any]]:
    machine, small = timer.machine, timer.machine.interpreted
    shapes = [(4, 12), (8, 0)] if small else [*((n, 0) for n in gpu_work.PROMPTS), (2048, 30720)]
    pool = Pool.random(sum(-(-(n + h) // BLOCK_SIZE) for n, h in shapes), torch.bfloat16, machine.device)
    rows = []
    for num_new, history in shapes:
        table = pool.tables(1, num_new + history)
        call, q = attention_call(machine, pool, make_batch(table, (num_new + history,), (num_new,), BLOCK_SIZE), 4)
        peers = gpu_peers.prefill(pool, q, table, history)
        name = f"prefill bf16 {num_new} tokens after {history}"
        rows.append(timer.row(name, gpu_work.prefill_work(num_new, history, 4), [call], peers))
    return rows


def shared_rows(timer: Timer) -> list[dict[str, Any]]:
    machine, small = timer.machine, timer.machine.interpreted
    num_seqs, shared, own = (3, 32, 16) if small else (64, 8192, 512)
    pool = Pool.random((shared + num_seqs * own) // BLOCK_SIZE, torch.bfloat16, machine.device)
    common = pool.tables(1, shared).expand(num_seqs, -1)
    table = torch.cat([common, pool.tables(num_seqs, own)], 1).contiguous()
    rows = []
    for name, read_once in (("plain", 0), ("shared", shared)):
        batch = make_batch(table, (shared + own,) * num_seqs, (1,) * num_seqs, BLOCK_SIZE)
        if read_once:
            group = PrefixGroup(tuple(range(num_seqs)), shared // BLOCK_SIZE)
            batch.plans[SharedPrefixes] = SharedPrefixes.build([group], BLOCK_SIZE, machine.device)
        call, _ = attention_call(machine, pool, batch, 4)
        work = gpu_work.decode_work(num_seqs, shared + own, 4, shared=read_once)
        rows.append(timer.row(f"decode bf16 batch {num_seqs}, {shared} shared and {own} own, {name}", work, [call], {}))
    return rows


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def main() -> int:
    parts = ("check", "ceilings", "decode", "prefill", "shared")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="Triton's interpreter on a CPU, tiny shapes")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of all inputs; fresh if left out")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/gpu.json")
    options = parser.parse_args()
    device = torch.device("cpu" if options.interpret else "cuda")
    machine = Machine(device, options.interpret, TritonAttention(device))
    torch.manual_seed(options.seed)
    import triton

    report: dict[str, Any] = {
        "card": machine.name, "torch": torch.__version__, "triton": triton.__version__, "commit": commit(),
        "seed": options.seed, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "failed": [],
    }  # fmt: skip
    print(*(f"{key} {value}" for key, value in report.items() if key != "failed"), sep="  ")
    begin = time.perf_counter()
    if "check" in options.only:
        for spec in specs(small=machine.interpreted):
            error = check(spec, machine.backend, device)
            print(f"check {spec.name}: {error:.2f} of what rounding allows", flush=True)
            report["failed"] += [] if error <= 1 else [spec.name]
    report["ceilings"] = ceilings(machine) if "ceilings" in options.only else {}
    print(*(f"{name} {value / 1e12:.3f} T/s" for name, value in report["ceilings"].items()), sep="  ")
    if machine.interpreted:
        print("the times below are the interpreter's: they show that the script runs, and nothing about a GPU")
    timer = Timer(machine, report["ceilings"])
    timed = {"decode": decode_rows, "prefill": prefill_rows, "shared": shared_rows}
    report["rows"] = [row for name in options.only if name in timed for row in timed[name](timer)]
    report["seconds"] = time.perf_counter() - begin
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1))
    print(f"{report['seconds']:.0f} s, checks failed: {report['failed'] or 'none'}, written to {options.json.name}")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
