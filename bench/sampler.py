"""What sampling and detokenising cost a step: 64 rows over 49,152 tokens.

    python bench/sampler.py [--rows 64] [--vocab 49152] [--threads 2] [--steps 15] [--json FILE]

Each case is checked before it is timed: greedy against argmax, the others against the same rows sampled one by one.
Times are milliseconds a step, the median and the spread (10th to 90th percentile) over the steps. The logits are
normal, scaled by 3, which is flatter than a trained model's, so top_p looks at more of a row than it usually would.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagedkv.engine.params import SamplingParams
from pagedkv.engine.sampler import Sampler, SampleRow
from pagedkv.engine.stop import Voice

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, 5 logprobs": {"temperature": 0, "logprobs": 5},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties, greedy": {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "penalties, top_p 0.9": {"temperature": 0.6, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}
PROMPT, OUTPUT = 500, 100  # tokens of each row before the measured step


class Bytes:
    """Stands for a tokenizer: tokens of one to six bytes, some of them parts of a character."""

    special_ids = frozenset({0})

    def __init__(self, vocab: int) -> None:
        text = ("The quick brown fox. " * 40 + "한국어 漢字 😀 ").encode()
        self._bytes = [text[i * 7 % 800 : i * 7 % 800 + 1 + i % 6] for i in range(vocab)]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]


def make_rows(rows: int, vocab: int, params: dict[str, Any]) -> list[SampleRow]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (rows, PROMPT + OUTPUT), generator=generator).tolist()
    return [SampleRow(SamplingParams(**params, seed=i), tokens[i], PROMPT, seed=i) for i in range(rows)]


def sampler_step(rows: list[SampleRow], logits: torch.Tensor) -> Callable[[], None]:
    """One step: sample, then append, so that the counts of a penalty have something to catch up with."""
    sampler = Sampler(logits.shape[1])

    def step() -> None:
        for row, token in zip(rows, sampler.sample(logits, rows).token_ids, strict=True):
            row.tokens.append(token)  # type: ignore[attr-defined]

    alone = [sampler.sample(logits[i : i + 1], [row]).token_ids[0] for i, row in enumerate(rows)]
    assert sampler.sample(logits, rows).token_ids == alone
    if rows[0].params == SamplingParams(temperature=0, seed=0):
        assert alone == logits.argmax(-1).tolist()
    return step


def voice_step(rows: int, vocab: int, stop: list[str]) -> Callable[[], None]:
    params = SamplingParams(stop=stop, max_tokens=None)
    voices = [Voice(Bytes(vocab), params) for _ in range(rows)]
    tokens = torch.randint(1, vocab, (rows, 4096), generator=torch.Generator().manual_seed(1)).tolist()
    position = 0

    def step() -> None:
        nonlocal position
        for voice, own in zip(voices, tokens, strict=True):
            voice.push(own[position % 4096])
        position += 1

    return step


def measure(step: Callable[[], None], steps: int) -> dict[str, float]:
    times = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    times = sorted(times[2:])
    return {
        "median_ms": statistics.median(times),
        "p10_ms": times[len(times) // 10],
        "p90_ms": times[-1 - len(times) // 10],
    }


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logits = torch.randn(args.rows, args.vocab, generator=torch.Generator().manual_seed(0)) * 3
    results: dict[str, dict[str, float]] = {}
    for name, params in CASES.items():
        step = sampler_step(make_rows(args.rows, args.vocab, params), logits)
        results[f"sampler: {name}"] = measure(step, args.steps)
    for name, stop in (("no stop strings", []), ("4 stop strings", ["\n\n", "###", "User:", "</s>"])):
        results[f"detokeniser: {name}"] = measure(voice_step(args.rows, args.vocab, stop), max(args.steps, 200))
    print(f"{args.rows} rows, {args.vocab:,} tokens, {args.threads} threads, ms a step: median (p10 .. p90)")
    for name, times in results.items():
        print(f"  {name:34}{times['median_ms']:9.3f}  ({times['p10_ms']:.3f} .. {times['p90_ms']:.3f})")
    if args.json:
        setting = {
            "rows": args.rows,
            "vocab": args.vocab,
            "threads": args.threads,
            "seed": 0,
            "torch": torch.__version__,
        }
        machine = {"machine": platform.processor() or platform.machine(), "commit": commit()}
        args.json.write_text(json.dumps({**setting, **machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
