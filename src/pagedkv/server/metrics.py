"""``GET /metrics``: vLLM's names, word for word, so that its dashboards and autoscalers read this server too.

Gauges and counters are read from the engine's own books when Prometheus asks; histograms are fed by the engine's
thread as things happen. Every series is there from the start, at 0, and counters never fall. "KV in use" is what
sequences hold: cached blocks that nobody uses are room, so an idle server shows 0. The partition of the pool, which
vLLM has no name for, is ``pagedkv:blocks``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from pagedkv.async_llm import AsyncLLM
from pagedkv.engine.metrics import EngineStats
from pagedkv.engine.outputs import RequestOutput

router = APIRouter()

TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

LABELS = ("model_name", "engine")


class EngineMetrics(Collector):
    """Everything under one registry. Also the engine's observer, which feeds the histograms."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._llm = llm
        self._values = (model_name, "0")
        self._seen_tokens = 0
        self._last_token: dict[int, tuple[float, int]] = {}
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "tokens in a step", STEP_TOKENS)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "arrival to first token", TTFT_SECONDS)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "between two tokens", TOKEN_SECONDS)
        self._spans = {
            "e2e_latency": self._histogram("vllm:e2e_request_latency_seconds", "arrival to end", REQUEST_SECONDS),
            "queue_time": self._histogram("vllm:request_queue_time_seconds", "arrival to first step", REQUEST_SECONDS),
            "prefill_time": self._histogram(
                "vllm:request_prefill_time_seconds", "first step to first token", REQUEST_SECONDS
            ),
            "decode_time": self._histogram(
                "vllm:request_decode_time_seconds", "first token to last token", REQUEST_SECONDS
            ),
        }
        self._prompt = self._histogram("vllm:request_prompt_tokens", "prompt tokens of a request", REQUEST_TOKENS)
        self._generated = self._histogram("vllm:request_generation_tokens", "tokens it generated", REQUEST_TOKENS)
        self._cached_prompt_tokens = self._prompt_tokens = 0
        self.registry.register(self)
        llm.observe(self)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, meaning, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(*self._values)

    # ---- the observer ----

    def stepped(self, stats: EngineStats) -> None:
        """The tokens of the step that has just ended."""
        total = stats.prefill_tokens + stats.decode_tokens
        if total > self._seen_tokens:
            self._step_tokens.observe(total - self._seen_tokens)
            self._seen_tokens = total

    def delivered(self, outputs: Sequence[RequestOutput]) -> None:
        """Times between tokens, and when a request ends all that is known of it."""
        for output in outputs:
            self._tokens(output)
            if output.finished:
                self._ended(output)

    def _tokens(self, output: RequestOutput) -> None:
        moment = output.metrics.last_token
        if moment is None:
            return
        key = id(output.metrics)  # one object for the life of a request
        count = sum(len(choice.token_ids) for choice in output.outputs)
        before = self._last_token.get(key)
        if before is None:
            if (ttft := output.metrics.time_to_first_token) is not None:
                self._ttft.observe(ttft)
            self._prompt_tokens += len(output.prompt_token_ids)
            self._cached_prompt_tokens += output.num_cached_tokens
        elif count > before[1]:
            self._between.observe(moment - before[0])
        self._last_token[key] = (moment, count)

    def _ended(self, output: RequestOutput) -> None:
        self._last_token.pop(id(output.metrics), None)
        for name, histogram in self._spans.items():
            span = getattr(output.metrics, name)
            if span is not None:
                histogram.observe(span)
        self._prompt.observe(len(output.prompt_token_ids))
        self._generated.observe(sum(len(choice.token_ids) for choice in output.outputs))

    # ---- the collector ----

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats()
        for name, meaning, value in (
            ("vllm:num_requests_running", "sequences that hold blocks", stats.num_running),
            ("vllm:num_requests_waiting", "sequences that wait for room or their turn", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "share of the pool that sequences hold, 0 to 1", stats.kv_cache_usage),
            ("pagedkv:engine_up", "1 while the engine answers", float(self._llm.is_alive)),
        ):
            yield self._gauge(name, meaning, value)
        for name, meaning, total in (
            ("vllm:prefix_cache_queries", "prompt tokens that asked the prefix cache", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "prompt tokens that it had", stats.prefix_hits),
            ("vllm:prompt_tokens", "prompt tokens of requests that have begun to answer", self._prompt_tokens),
            ("vllm:prompt_tokens_cached", "those of them that came from the cache", self._cached_prompt_tokens),
            ("vllm:generation_tokens", "tokens generated", stats.generated_tokens),
            ("vllm:num_preemptions", "times a sequence lost its blocks", stats.num_preemptions),
            ("pagedkv:recomputed_tokens", "tokens computed again after that", stats.recomputed_tokens),
            ("pagedkv:evicted_blocks", "cached blocks given up for room", stats.evicted_blocks),
            ("pagedkv:requests_failed", "requests that ended with an error of their own", stats.num_failed),
        ):
            family = CounterMetricFamily(name, meaning, labels=LABELS)
            family.add_metric(self._values, total)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success", "requests that ended, by reason", labels=(*LABELS, "finished_reason")
        )
        for reason, count in stats.finished.items():
            success.add_metric((*self._values, reason), count)
        yield success
        yield from self._pool(stats)

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, meaning, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _pool(self, stats: EngineStats) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "pagedkv:blocks", "the pool by state; the states add up to num_gpu_blocks", labels=(*LABELS, "state")
        )
        blocks.add_metric((*self._values, "free"), stats.blocks_free)
        blocks.add_metric((*self._values, "cached"), stats.blocks_cached)
        blocks.add_metric((*self._values, "in_use"), stats.blocks_in_use)
        yield blocks
        config = self._llm.config
        described = {
            "block_size": str(stats.block_size),
            "num_gpu_blocks": str(stats.num_blocks),
            "cache_dtype": config.cache.kv_cache_dtype,
            "enable_prefix_caching": str(config.cache.enable_prefix_caching),
            "eviction_policy": config.cache.eviction_policy,
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "how the cache is set up", labels=(*LABELS, *described))
        info.add_metric((*self._values, *described.values()), 1)
        yield info


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    registry = request.app.state.metrics.registry
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
