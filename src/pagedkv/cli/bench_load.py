"""What ``bench serve``, ``bench throughput`` and ``bench latency`` share: the requests and the figures.

Names of flags and of the fields in the JSON are vLLM's, so that results can be laid side by side.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedkv.errors import InvalidRequest

DATASETS = ("random", "prefix_repetition", "trace")


@dataclass(frozen=True)
class Load:
    """One request: token ids, how many tokens it generates (EOS ignored), when it comes (seconds from the start)."""

    prompt: list[int]
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Shape:
    """What requests are made of.

    prefix_repetition: ``num_prefixes`` prefixes of ``prefix_len`` tokens, each before suffixes of ``input_len``
    trace: a file of ``insight.trace``'s formats; its lengths and shared blocks, cut to ``input_len`` where longer
    """

    dataset: str = "random"
    num_prompts: int = 32
    input_len: int = 256
    output_len: int = 64
    prefix_len: int = 512
    num_prefixes: int = 4
    trace: Path | None = None
    seed: int = 0

    def loads(self, vocab_size: int) -> list[Load]:
        """The requests; the same for the same shape."""
        draw = random.Random(self.seed)
        first = min(100, vocab_size // 2)  # special tokens lie at the start of most vocabularies

        def tokens(count: int) -> list[int]:
            return [draw.randrange(first, vocab_size) for _ in range(count)]

        if self.dataset == "random":
            return [Load(tokens(self.input_len), self.output_len) for _ in range(self.num_prompts)]
        if self.dataset == "prefix_repetition":
            prefixes = [tokens(self.prefix_len) for _ in range(self.num_prefixes)]
            each = [prefixes[i % self.num_prefixes] for i in range(self.num_prompts)]
            return [Load(prefix + tokens(self.input_len), self.output_len) for prefix in each]
        if self.dataset == "trace":
            return self._of_trace(first, vocab_size)
        raise InvalidRequest(f"dataset_name: {self.dataset!r} is none of {', '.join(DATASETS)}", field="dataset_name")

    def _of_trace(self, first: int, vocab_size: int) -> list[Load]:
        """Requests with the trace's lengths and arrival times; equal blocks of it become equal tokens."""
        from pagedkv.insight.trace import read_trace

        if self.trace is None:
            raise InvalidRequest("trace: --dataset-name trace needs --trace FILE", field="trace")
        trace = read_trace(self.trace, self.num_prompts)
        loads: list[Load] = []
        for request in trace.requests:
            prompt: list[int] = []
            for chunk in request.chunks:
                draw = random.Random(f"{self.seed} {chunk}")
                size = min(trace.chunk_tokens, self.input_len - len(prompt), request.num_prompt_tokens - len(prompt))
                prompt += [draw.randrange(first, vocab_size) for _ in range(size)]
            output_len = max(1, min(request.num_output_tokens, self.output_len))
            loads.append(Load(prompt, output_len, request.arrival))
        return loads


@dataclass
class Timeline:
    """Of one request, in seconds from the start of the benchmark: sent, and each token's arrival."""

    sent: float
    prompt_tokens: int
    moments: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    error: str | None = None


def arrivals(count: int, request_rate: float, burstiness: float, seed: int = 0) -> list[float]:
    """When requests come: all at once for an infinite rate, else gaps of a gamma distribution (1: Poisson)."""
    if request_rate == float("inf"):
        return [0.0] * count
    draw = random.Random(seed)
    moments, now = [], 0.0
    for _ in range(count):
        moments.append(now)
        now += draw.gammavariate(burstiness, 1.0 / (request_rate * burstiness))
    return moments


def figures(timelines: Sequence[Timeline], duration: float) -> dict[str, Any]:
    """The result, with vLLM's field names. Times in milliseconds, throughputs per second."""
    good = [line for line in timelines if line.error is None and line.moments]
    tokens_in = sum(line.prompt_tokens for line in good)
    tokens_out = sum(len(line.moments) for line in good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(timelines) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "total_cached_tokens": sum(line.cached_tokens for line in good),
        "request_throughput": len(good) / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
    }
    gaps = [[b - a for a, b in zip(line.moments, line.moments[1:], strict=False)] for line in good]
    for name, values in (
        ("ttft", [line.moments[0] - line.sent for line in good]),
        ("tpot", [sum(gap) / len(gap) for gap in gaps if gap]),
        ("itl", [value for gap in gaps for value in gap]),
        ("e2el", [line.moments[-1] - line.sent for line in good]),
    ):
        result |= _summary(name, [1e3 * value for value in values])
    return result


def _summary(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {f"{kind}_{name}_ms": 0.0 for kind in ("mean", "median", "std", "p99")}
    ordered = sorted(values)
    return {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": statistics.median(ordered),
        f"std_{name}_ms": statistics.pstdev(ordered),
        f"p99_{name}_ms": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))],
    }


def show(title: str, result: dict[str, Any], save: Path | None) -> None:
    """A table for people, and the JSON where it was asked for."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for name, value in result.items():
        table.add_row(
            name,
            f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value),
        )
    Console().print(table)
    if save is not None:
        save.write_text(json.dumps(result, indent=1) + "\n")
        print(f"saved to {save}")
