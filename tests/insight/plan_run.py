"""Run by test_plan.py in a process of its own: loads, prefills 2,048 tokens, prints what that took as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from pagedkv import LLM, SamplingParams
from pagedkv.model.hub import resolve
from pagedkv.model.load import tokenizer_of


def anonymous_bytes() -> int:
    """Resident memory without mapped files: a checkpoint that is read through a map does not stay."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    model, kv_dtype, pool_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.ones(8, 8) @ torch.ones(8, 8)
    # The vocabulary's Python objects are no part of the plan: a second one tells what the engine's own takes.
    first = tokenizer_of(resolve(model))
    without = anonymous_bytes()
    second = tokenizer_of(resolve(model))
    before = anonymous_bytes()
    vocabulary = before - without
    assert first.vocab_size == second.vocab_size
    llm = LLM(model, dtype="bfloat16", kv_cache_dtype=kv_dtype, kv_cache_memory_bytes=pool_bytes, max_model_len=2064)
    prompt = [(7 * i) % 250 + 3 for i in range(2048)]
    llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    built = llm._built
    pool = built.pool.data.nbytes + (0 if built.pool.scales is None else built.pool.scales.nbytes)
    figures = {
        "growth": anonymous_bytes() - before - vocabulary,
        "num_blocks": built.pool.num_blocks,
        "pool_bytes": pool,
        "weight_bytes": built.loaded.weight_bytes,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
