"""What the prefix cache costs for long prompts: attach and remember, time and memory against the length.

    python bench/prefix.py [--block-size 16] [--rounds 7] [--json FILE]

Claim: a prompt of 131,072 tokens at block 16 is hashed, looked up and published in under 60 ms and 8 MB of keys, and
both grow linearly. Each round is a fresh cache; the second request with the same prompt must find all but one token of
its full blocks, and the accounts must agree, or there is no figure. Memory is what the cache and the sequence keep
(tracemalloc, in a round of its own, since it slows the clock).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
import tracemalloc
from pathlib import Path
from typing import Any

from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.native import extension
from pagedkv.cache.prefix import PrefixCache

LENGTHS = (8_192, 32_768, 131_072)
SEED = 7


def publish(prompt: list[int], block_size: int) -> tuple[PrefixCache, KVCacheManager, dict[str, float]]:
    """A cold attach, the room, and the publication of ``prompt`` in a new cache; milliseconds of each call."""
    manager = KVCacheManager(2 * len(prompt) // block_size + 2, block_size)
    cache = PrefixCache(manager)
    times: dict[str, float] = {}

    def clocked(name: str, began: float) -> None:
        times[name] = 1e3 * (time.perf_counter() - began)

    began = time.perf_counter()
    cache.attach("cold", prompt)
    clocked("attach, cold", began)
    began = time.perf_counter()
    manager.reserve("cold", len(prompt))
    manager.advance("cold", len(prompt))
    clocked("reserve", began)
    began = time.perf_counter()
    cache.remember("cold", prompt)
    clocked("remember", began)
    return cache, manager, times


def measure(length: int, block_size: int, rounds: int) -> dict[str, Any]:
    rng = random.Random(SEED)
    prompt = [rng.randrange(150_000) for _ in range(length)]
    samples: list[dict[str, float]] = []
    for _ in range(rounds):
        cache, manager, times = publish(prompt, block_size)
        began = time.perf_counter()
        found = cache.attach("warm", prompt)
        times["attach, warm"] = 1e3 * (time.perf_counter() - began)
        began = time.perf_counter()
        manager.free("warm")
        manager.free("cold")
        times["free both"] = 1e3 * (time.perf_counter() - began)
        if found != min(length - 1, length // block_size * block_size):
            raise SystemExit(f"{found} of {length} tokens found: the cache is wrong, so its time means nothing")
        manager.check()
        samples.append({"attach + remember": times["attach, cold"] + times["remember"], **times})
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = publish(prompt, block_size)
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    del kept
    row: dict[str, Any] = {"tokens": length, "blocks": length // block_size, "kept_mb": round(size / 1e6, 3)}
    for name in samples[0]:
        values = sorted(sample[name] for sample in samples)
        row[name] = {
            "median_ms": round(statistics.median(values), 3),
            "spread_ms": [round(values[0], 3), round(values[-1], 3)],
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chain = "native" if extension is not None else "hashlib"
    print(f"block {options.block_size}, keys by {chain}, medians of {options.rounds} rounds (ms)")
    rows = [measure(length, options.block_size, options.rounds) for length in LENGTHS]
    for row in rows:
        calls = {name: value["median_ms"] for name, value in row.items() if isinstance(value, dict)}
        shown = ", ".join(f"{name} {value:.2f}" for name, value in calls.items())
        print(f"{row['tokens']:>7} tokens: {shown}; {row['kept_mb']:.2f} MB kept")
    if options.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        about = {"machine": platform.platform(), "python": platform.python_version(), "commit": commit, "seed": SEED}
        options.json.write_text(json.dumps({**about, "chain": chain, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
