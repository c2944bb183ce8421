"""Our decode attention beside vLLM's CPU kernel: the same bytes of K and V, two threads, in turns within a round.

    python bench/peers/attention.py --work DIR [--rounds 15] [--kv-heads 4] [--sizes 16,32,128] [--json FILE]

DIR is that of run.py (its vLLM environment is used, and made if it is not there). Each engine reads its own pool with
scattered tables; calls go through as many layers as it takes to read 100 MB, three times a last-level cache of 32 MiB.
Both are checked before they are timed: ours against the float64 reference, vLLM's against a float32 softmax. 16, 32
and 128 are our default block size, the smallest that vLLM's CPU backend takes, and its default; its kernel itself
takes 16 too, through another instruction-set variant, so that is measured as well.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.dispatch import paged_attention
from pagedkv.cache.pool import KVPool
from run import PEERS, machine, python_of

HERE = Path(__file__).resolve().parent
WORKING_SET = 100 << 20
LARGEST_ERROR = 2e-2
PAUSE = 0.01  # seconds before each timed call: the other process's threads have stopped spinning by then


class Ours:
    """One decode call for every layer of a pool; a case as in attention_vllm.py."""

    def __init__(self, case: dict[str, int]) -> None:
        torch.manual_seed(0)
        size, dim, width = case["block_size"], case["head_dim"], -(-case["context"] // case["block_size"])
        self._pool = KVPool(case["batch"] * width, case["layers"], case["kv_heads"], size, dim, dtype=torch.bfloat16)
        self._pool.data.normal_()
        tables = torch.randperm(case["batch"] * width).reshape(-1, width).tolist()
        self._batch = AttentionBatch.build(tables, [case["context"]] * case["batch"], [1] * case["batch"], size)
        self._q = torch.randn(case["batch"], case["kv_heads"] * case["group"], dim).bfloat16()
        self._out = torch.empty_like(self._q)
        self.nbytes = self._pool.nbytes

    def _attend(self, layer: int) -> None:
        k, v = self._pool.k_pool[layer], self._pool.v_pool[layer]
        scale = self._q.shape[-1] ** -0.5
        paged_attention(self._q, k, v, self._batch, scale=scale, backend="native", out=self._out)

    def error(self) -> float:
        k, v, scale = self._pool.k_pool[0], self._pool.v_pool[0], self._q.shape[-1] ** -0.5
        self._attend(0)
        want = paged_attention(self._q.double(), k, v, self._batch, scale=scale, backend="reference")
        return float((self._out.double() - want).abs().max() / want.abs().max().clamp(min=1))

    def run(self) -> float:
        start = time.perf_counter()
        for layer in range(self._pool.num_layers):
            self._attend(layer)
        return time.perf_counter() - start


class Theirs:
    """attention_vllm.py in its own process."""

    def __init__(self, python: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [python, HERE / "attention_vllm.py", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()["vllm"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"vLLM's process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


def cases(kv_heads: int, sizes: list[int]) -> Iterator[dict[str, int]]:
    shapes = [(8, 2048, dim, group) for dim in (64, 128) for group in (1, 3, 4, 8)]
    for batch, context, head_dim, group in [*shapes, (1, 8192, 64, 3), (1, 8192, 128, 4)]:
        layers = max(1, math.ceil(WORKING_SET / (2 * batch * context * kv_heads * head_dim * 2)))
        for size in sizes:
            yield {"batch": batch, "context": context, "kv_heads": kv_heads, "group": group, "head_dim": head_dim,
                   "block_size": size, "layers": layers}  # fmt: skip


def compare(case: dict[str, int], theirs: Theirs, rounds: int) -> dict[str, Any]:
    ours = Ours(case)
    prepared = theirs.ask({"do": "prepare", **case})
    for name, error in (("ours", ours.error()), ("vLLM's", prepared["error"])):
        if not error < LARGEST_ERROR:
            raise SystemExit(f"{name} is wrong by {error:.3g} for {case}; at most {LARGEST_ERROR} was expected")
    if prepared["bytes"] != ours.nbytes:
        raise SystemExit(f"{ours.nbytes} bytes of K and V here, {prepared['bytes']} there, for {case}")
    seconds: dict[str, list[float]] = {"ours": [], "vllm": []}
    for round_ in range(rounds + 2):  # the first two warm up
        for name in ("ours", "vllm"):
            time.sleep(PAUSE)
            took = ours.run() if name == "ours" else theirs.ask({"do": "run"})["seconds"]
            if round_ > 1:
                seconds[name].append(took)
    found: dict[str, Any] = {**case, "isa": prepared["isa"]}
    for name, times in seconds.items():
        middle = statistics.median(times)
        found[f"{name}_ms"] = 1e3 * middle / case["layers"]
        found[f"{name}_range_ms"] = [1e3 * time_ / case["layers"] for time_ in (min(times), max(times))]
        found[f"{name}_gb_s"] = ours.nbytes / middle / 1e9
    found["times"] = found["vllm_ms"] / found["ours_ms"]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| batch x context | head_dim | group | block size | ours, ms (GB/s) | vLLM, ms (GB/s) | times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    form = (
        "| {batch} x {context:,} | {head_dim} | {group} | {block_size} | {ours_ms:.3f} ({ours_gb_s:.1f}) | "
        "{vllm_ms:.3f} ({vllm_gb_s:.1f}) | {times:.2f} |"
    )
    return "\n".join([*lines, *(form.format(**row) for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--sizes", default="16,32,128")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    vllm = next(peer for peer in PEERS if peer.venv == "vllm")
    theirs = Theirs(python_of(vllm, args.work.resolve()), args.threads)
    sizes = [int(size) for size in args.sizes.split(",")]
    rows = []
    for case in cases(args.kv_heads, sizes):
        rows.append(compare(case, theirs, args.rounds))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    theirs.close()
    if args.json is not None:
        record = {**machine(), "threads": args.threads, "vllm": theirs.version, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
