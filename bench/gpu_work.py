"""What attention must move and compute, and how long that takes a card at best. Plain arithmetic.

    python bench/gpu_work.py        the table of docs/benchmarks.md, for the nominal figures of an H200

Decode: every K and V byte of the batch is read once per KV head. Prefill: 4 * Hq * D operations for each pair of a
query and a key that it sees. A time is the larger of bytes / bandwidth and operations / rate; nothing else is counted
(no launches, no tails, no imbalance), so it is a bound that a kernel can only approach.
"""

from __future__ import annotations

from dataclasses import dataclass

H200_BANDWIDTH = 4.8e12  # bytes a second, the data sheet's
H200_BF16 = 990e12  # dense bf16 operations a second, the data sheet's (SXM, 989.4 teraFLOPS)

BATCHES = (1, 16, 64, 256)
CONTEXTS = (1024, 8192, 32768)
PROMPTS = (512, 2048, 8192, 32768)
NUM_KV_HEADS, HEAD_DIM = 8, 128


@dataclass(frozen=True)
class Work:
    """Bytes moved and operations done by one call, for one layer."""

    num_bytes: int
    operations: int

    def seconds(self, bandwidth: float, rate: float) -> float:
        """The least time on a card of ``bandwidth`` bytes/s and ``rate`` operations/s."""
        return max(self.num_bytes / bandwidth, self.operations / rate)


def position_bytes(pool: str, num_kv_heads: int = NUM_KV_HEADS, head_dim: int = HEAD_DIM) -> int:
    """K and V of one position in one layer, with the scales of a quantised pool."""
    element, scale = {"bf16": (2, 0), "fp16": (2, 0), "fp8": (1, 4), "int8": (1, 4), "fp32": (4, 0)}[pool]
    return 2 * num_kv_heads * (head_dim * element + scale)


def decode_work(num_seqs: int, context: int, group: int, pool: str = "bf16", shared: int = 0) -> Work:
    """One token for each of ``num_seqs`` sequences of ``context`` positions, ``shared`` of them read once for all."""
    heads = NUM_KV_HEADS * group
    positions = num_seqs * (context - shared) + shared
    rows = 2 * 2 * num_seqs * heads * HEAD_DIM  # q read and output written, 16 bits
    return Work(positions * position_bytes(pool) + rows, 4 * num_seqs * heads * HEAD_DIM * context)


def prefill_work(num_new: int, history: int, group: int, pool: str = "bf16") -> Work:
    """``num_new`` tokens of one sequence after ``history`` others, causal."""
    heads = NUM_KV_HEADS * group
    pairs = num_new * history + num_new * (num_new + 1) // 2
    rows = 2 * 2 * num_new * heads * HEAD_DIM
    return Work((history + num_new) * position_bytes(pool) + rows, 4 * heads * HEAD_DIM * pairs)


def bound(work: Work) -> str:
    """Which of the two takes longer on an H200."""
    return "bytes" if work.num_bytes / H200_BANDWIDTH > work.operations / H200_BF16 else "operations"


def rows() -> list[tuple[str, Work]]:
    """What bench/gpu.py times, named."""
    table = []
    for pool in ("bf16", "fp8"):
        for num_seqs in BATCHES:
            for context in CONTEXTS:
                name = f"decode, batch {num_seqs}, context {context}, {pool}"
                table.append((name, decode_work(num_seqs, context, 4, pool)))
    table += [(f"prefill, {num_new} tokens", prefill_work(num_new, 0, 4)) for num_new in PROMPTS]
    table.append(("prefill, chunk of 2048 after 30720", prefill_work(2048, 30720, 4)))
    table.append(("decode, batch 64, 8192 shared and 512 own, plain", decode_work(64, 8704, 4)))
    table.append(("decode, batch 64, 8192 shared and 512 own, shared", decode_work(64, 8704, 4, shared=8192)))
    return table


def main() -> None:
    print(f"D {HEAD_DIM}, {NUM_KV_HEADS} KV heads, group 4, one layer; {H200_BANDWIDTH / 1e12} TB/s and "
          f"{H200_BF16 / 1e12:.0f} TFLOP/s\n")  # fmt: skip
    print("| call | bytes (MB) | operations (GFLOP) | bound by | least time (us) |\n|---|---|---|---|---|")
    for name, work in rows():
        least = work.seconds(H200_BANDWIDTH, H200_BF16) * 1e6
        print(f"| {name} | {work.num_bytes / 1e6:,.1f} | {work.operations / 1e9:,.2f} | {bound(work)} | {least:,.1f} |")


if __name__ == "__main__":
    main()
