"""The CPU attention kernels: A1 decode, Q quantised KV, A2 prefill, A3 shared prefixes, with the machine in the JSON.

    python bench/attention.py [--what A1,Q,A2,A3] [--rounds 7] [--threads 2] [--full] [--save FILE]

The measuring is pagedkv.insight.attention_rates (as `pagedkv bench attention`): every case is checked first, the
streaming rate and torch's SDPA are measured in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from pathlib import Path

import torch

from pagedkv.attention.native import NativeAttention
from pagedkv.cli.bench_attention import measure, show


def machine(threads: int) -> dict[str, object]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":", 1)[1].strip() for line in info.splitlines() if "model name" in line), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {"cpu": model or platform.processor(), "threads": threads, "torch": torch.__version__, "commit": commit,
            "instruction_set": NativeAttention().instruction_set, "seed": 0}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="A1,Q,A2,A3")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="every batch, context and block size of A1")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    result: dict[str, object] = {"machine": machine(args.threads)}
    for name in args.what.split(","):
        rates = measure(name, args.rounds, args.full)
        show(name, rates)
        result[name] = [rate.as_dict() for rate in rates]
    if args.save is not None:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
