"""What a step costs beside the model: 64 running sequences, ten thousand waiting, a model that does nothing.

    python bench/engine_step.py [--steps 2000] [--queued 10000]

Prints one JSON object: microseconds a step for scheduling, batch building and commit (median and 99th percentile, the
three together must stay under 1,000), the sampler and the detokeniser apart, and bytes of memory per queued request.
The numbers of the last steps are compared with the first, so growth with the context would show.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable

import torch
from torch import Tensor

from pagedkv.attention.batch import AttentionBatch
from pagedkv.cache.keys import KeyScope
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.prefix import PrefixCache
from pagedkv.config import SchedulerConfig
from pagedkv.engine.engine import Engine
from pagedkv.engine.intake import Intake, Limits
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.runner import ModelRunner
from pagedkv.engine.sampler import Sampler
from pagedkv.engine.sampling import Sampling
from pagedkv.engine.scheduler import Scheduler
from pagedkv.engine.stop import Voice

VOCAB = 49_152
RUNNING = 64


class NoModel:
    """Logits that are the same for every row; the work of a forward pass is left out."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._logits = torch.rand((256, VOCAB), generator=torch.Generator().manual_seed(0))
        self._hidden = torch.zeros((4096, 1))

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: object, rows: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self._hidden[: len(token_ids if rows is None else rows)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


class NoPool:
    k_pool: tuple[Tensor, ...] = ()
    v_pool: tuple[Tensor, ...] = ()
    k_scale: tuple[Tensor, ...] = ()
    v_scale: tuple[Tensor, ...] = ()

    def copy_blocks(self, copies: object) -> None:
        """Nothing is stored."""


class Letters:
    """A tokenizer of single letters, for the detokeniser's own cost."""

    vocab_size = VOCAB
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id % 26])


def make_engine() -> Engine:
    blocks, size = 16_384, 16
    config = SchedulerConfig(max_num_seqs=RUNNING, max_num_batched_tokens=2048)
    manager = KVCacheManager(blocks, size)
    scope = KeyScope(model="none")
    prefix = PrefixCache(manager, scope)
    intake = Intake(Limits(VOCAB, blocks * size, blocks * size), None, scope=scope, max_num_seqs=RUNNING)
    runner = ModelRunner(NoModel(), NoPool(), manager, RUNNING)
    return Engine(intake, Scheduler(config, manager, prefix), runner, Sampling(Sampler(VOCAB), intake.voice))


def timed(engine: Engine, steps: int) -> dict[str, list[float]]:
    """Microseconds of each part, step by step."""
    parts = ("schedule_seconds", "build_seconds", "commit_seconds", "sample_seconds")
    taken: dict[str, list[float]] = {part: [] for part in parts}
    before = engine.stats()
    for _ in range(steps):
        engine.step()
        now = engine.stats()
        for part in parts:
            taken[part].append(1e6 * (getattr(now, part) - getattr(before, part)))
        before = now
    return taken


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 1), "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 1)}


def detokeniser_microseconds(tokens: int = 2000) -> float:
    voices = [Voice(Letters(), SamplingParams(max_tokens=None, stop=["zzzz"])) for _ in range(RUNNING)]  # type: ignore[arg-type]
    begin = time.perf_counter()
    for token in range(tokens):
        for voice in voices:
            voice.push(token)
    return 1e6 * (time.perf_counter() - begin) / tokens


def bytes_per_queued(engine: Engine, count: int, prompt: Callable[[int], list[int]]) -> float:
    tracemalloc.start()
    first, _ = tracemalloc.get_traced_memory()
    params = SamplingParams(temperature=0, max_tokens=16)
    for i in range(count):
        engine.add_request(f"queued {i}", prompt(i), params, final_only=True)
    last, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (last - first) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--queued", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    engine = make_engine()
    for i in range(RUNNING):
        prompt = [(i * 131 + j) % VOCAB for j in range(200 + i)]
        engine.add_request(f"running {i}", prompt, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    while engine.scheduler.waiting or any(seq.in_prefill for seq in engine.scheduler.running):
        engine.step()
    half = arguments.queued // 2
    short = lambda i: [(i * 17 + j) % VOCAB for j in range(20)]  # noqa: E731
    memory = [bytes_per_queued(engine, half, short), bytes_per_queued(engine, half, short)]
    taken = timed(engine, arguments.steps)
    ours = ("schedule_seconds", "build_seconds", "commit_seconds")
    together = [sum(parts) for parts in zip(*(taken[part] for part in ours), strict=True)]
    tenth = max(1, len(together) // 10)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (RUNNING, 2 * half)
    report = {
        "machine": platform.processor() or platform.machine(),
        "running": RUNNING,
        "queued": stats.num_waiting,
        "steps": arguments.steps,
        "microseconds_a_step": {
            **{part.removesuffix("_seconds"): summary(taken[part]) for part in ours},
            "schedule+build+commit": summary(together),
            "first tenth": summary(together[:tenth]),
            "last tenth": summary(together[-tenth:]),
        },
        "sampler_microseconds_a_step": summary(taken["sample_seconds"]),
        "detokeniser_microseconds_a_step": round(detokeniser_microseconds(), 1),
        "bytes_per_queued_request": [round(value) for value in memory],
        "under_one_millisecond": statistics.median(together) < 1000,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
