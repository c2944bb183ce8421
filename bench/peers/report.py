"""What every driver prints: one JSON line. Imports nothing that is not in the standard library, so it runs anywhere."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path


def workload() -> dict:
    """The workload whose file is the last argument."""
    return json.loads(Path(sys.argv[-1]).read_text())


def measure(name: str, began: float, run: Callable[[list[list[int]], int], list[list[int]]], work: dict) -> None:
    """Times ``run(prompts, new_tokens) -> generated ids`` on a workload and prints the figures.

    ``began``: when the process started to load. A short run comes first, so that nothing is built while it counts.
    For one request alone the time to its first token is measured by a run for one token (no prefix cache then).
    """
    loaded = time.perf_counter() - began
    run([[1000 + i for i in range(64)]] * min(4, len(work["prompts"])), 4)
    prompts, new = work["prompts"], work["new_tokens"]
    if work["warm"]:
        run(prompts, 1)
    figures: dict = {"peer": name, "workload": work["name"], "load_s": loaded}
    if len(prompts) == 1:
        start = time.perf_counter()
        run(prompts, 1)
        figures["ttft_s"] = time.perf_counter() - start
    start = time.perf_counter()
    generated = run(prompts, new)
    figures["makespan_s"] = time.perf_counter() - start
    assert [len(ids) for ids in generated] == [new] * len(prompts), [len(ids) for ids in generated]
    figures["tokens_per_s"] = new * len(prompts) / figures["makespan_s"]
    if len(prompts) == 1:
        figures["prefill_tok_s"] = len(prompts[0]) / figures["ttft_s"]
        figures["decode_tok_s"] = (new - 1) / (figures["makespan_s"] - figures["ttft_s"])
    figures["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures["first_tokens"] = [ids[:8] for ids in generated[:4]]
    print("RESULT " + json.dumps(figures), flush=True)
