"""The engine under pressure, on a real model: a pool that is too small, and a prefix that many share.

    python bench/engine_pressure.py pressure [--model smollm2-135m] [--dtype auto] [--lone 8]
    python bench/engine_pressure.py prefix
    python bench/engine_pressure.py samples

pressure: 64 requests (lengths torch.randint(20, 500, (64,), generator=torch.Generator().manual_seed(2)), 64 new tokens
          each, EOS ignored) through a pool that holds a quarter of what they need, and through one that holds them all.
          Tokens of both runs must be the same, and for ``--lone`` of them those of a run alone.
prefix:   32 requests that share 1,024 tokens arrive at once; the prefix must be computed once.
samples:  n = 4 on a 40-token prompt: 3 blocks for the prompt, 3 more when the samples write.

Each prints one JSON object with the figures the engine reports.
"""

from __future__ import annotations

import argparse
import json
import platform
import time

import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.build import assemble
from pagedkv.engine.metrics import EngineStats
from pagedkv.engine.params import SamplingParams
from pagedkv.llm import LLM
from pagedkv.model.load import LoadedModel, load_model

BLOCK = 16
NEW = 64


def llm_with(loaded: LoadedModel, blocks: int, **options: int) -> LLM:
    config = EngineConfig.from_kwargs(model="loaded", num_gpu_blocks_override=blocks, block_size=BLOCK, **options)
    return LLM.from_built(assemble(config, loaded))


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list[list[int]], float, EngineStats]:
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - begin, llm.stats()


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(100, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def pressure(loaded: LoadedModel, lone: int) -> dict[str, object]:
    lengths = torch.randint(20, 500, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = random_prompts(lengths, loaded.config.vocab_size, 3)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    whole = sum(-(-(length + NEW) // BLOCK) for length in lengths)
    found = {}
    cpu: dict[str, float] = {}
    for name, blocks in (("all", whole), ("quarter", whole // 4)):
        spent = time.process_time()
        tokens, seconds, stats = run(llm_with(loaded, blocks, max_num_seqs=64), prompts, params)
        found[name] = (tokens, seconds, stats, blocks)
        cpu[name] = round(time.process_time() - spent, 2)
    assert found["all"][0] == found["quarter"][0], "the small pool changed an answer"
    for i in range(0, 64, max(1, 64 // lone)) if lone else ():
        alone, _, _ = run(llm_with(loaded, 64, enable_prefix_caching=False), [prompts[i]], params)
        assert alone[0] == found["quarter"][0][i], f"request {i} differs from its lone run"
    rate = {name: 64 * NEW / seconds for name, (_, seconds, _, _) in found.items()}
    stats = found["quarter"][2]
    return {
        "requests": 64,
        "prompt_tokens": sum(lengths),
        "new_tokens": 64 * NEW,
        "blocks": {name: value[3] for name, value in found.items()},
        "output_tokens_per_second": {name: round(value, 1) for name, value in rate.items()},
        "ratio": round(rate["quarter"] / rate["all"], 3),
        "cpu_seconds": cpu,
        "preemptions": stats.num_preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        "tokens_equal": True,
        "lone_runs_compared": lone,
    }


def prefix(loaded: LoadedModel) -> dict[str, object]:
    shared, *own = random_prompts([1024, *(8 + i % 9 for i in range(32))], loaded.config.vocab_size, 4)
    llm = llm_with(loaded, 512, max_num_seqs=32)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    _, seconds, stats = run(llm, [[*shared, *tail] for tail in own], params)
    least = 1024 + sum(map(len, own))
    assert least <= stats.prefill_tokens <= least + 32 * BLOCK
    return {
        "requests": 32,
        "shared_tokens": 1024,
        "own_tokens": sum(map(len, own)),
        "prefill_tokens_computed": stats.prefill_tokens,
        "prefix_hits": stats.prefix_hits,
        "twin_waits": stats.num_twin_waits,
        "seconds": round(seconds, 3),
    }


def samples(loaded: LoadedModel) -> dict[str, object]:
    llm = llm_with(loaded, 64)
    prompt = random_prompts([40], loaded.config.vocab_size, 5)[0]
    engine = llm.engine
    engine.add_request("x", prompt, SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True))
    engine.step()
    for_prompt = engine.stats().allocated_blocks
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    assert (for_prompt, stats.allocated_blocks - for_prompt, stats.copied_blocks) == (3, 3, 3)
    return {
        "blocks_for_the_prompt": for_prompt,
        "blocks_at_first_writes": stats.allocated_blocks - for_prompt,
        "copied_blocks": stats.copied_blocks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["pressure", "prefix", "samples"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lone", type=int, default=8, help="how many requests are compared with a run alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(arguments.model, dtype=arguments.dtype)
    made = {"pressure": lambda: pressure(loaded, arguments.lone), "prefix": lambda: prefix(loaded)}
    figures = made.get(arguments.what, lambda: samples(loaded))()
    about = {"model": loaded.description, "machine": platform.machine(), "threads": arguments.threads}
    print(json.dumps({**about, **figures}, indent=1))


if __name__ == "__main__":
    main()
