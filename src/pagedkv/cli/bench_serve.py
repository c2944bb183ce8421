"""``pagedkv bench serve``: a bounded load against a running server, with the figures that vLLM's benchmark gives."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.cli.bench_load import Load, Shape, Timeline, arrivals, figures, show

if TYPE_CHECKING:
    import httpx


def serve(
    base_url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Its name; the server's first if left out.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Its key.", envvar="PAGEDKV_API_KEY")] = None,
    dataset_name: Annotated[str, typer.Option(help="random, prefix_repetition or trace.")] = "random",
    trace: Annotated[Path | None, typer.Option(help="File for --dataset-name trace.", exists=True)] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests in all.", min=1)] = 32,
    random_input_len: Annotated[int, typer.Option(help="Prompt tokens (of their own).", min=1)] = 256,
    random_output_len: Annotated[int, typer.Option(help="Generated tokens.", min=1)] = 64,
    prefix_len: Annotated[int, typer.Option(help="prefix_repetition: shared tokens.")] = 512,
    num_prefixes: Annotated[int, typer.Option(help="prefix_repetition: prefixes.", min=1)] = 4,
    request_rate: Annotated[float, typer.Option(help="Requests a second; inf: all at once.")] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="1: Poisson arrivals; below 1: in bursts.", min=0.01)] = 1.0,
    max_concurrency: Annotated[int, typer.Option(help="Requests under way at a time.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    save_result: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Send requests to a server and measure TTFT, time per token and throughput."""
    lengths = (random_input_len, random_output_len, prefix_len, num_prefixes)
    shape = Shape(dataset_name, num_prompts, *lengths, trace, seed)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    rate = (request_rate, burstiness)
    result = asyncio.run(_measure(base_url, model, headers, shape, rate, max_concurrency))
    show(f"{num_prompts} requests, {dataset_name}", result, save_result)


async def _measure(
    url: str, model: str | None, headers: dict[str, str], shape: Shape, rate: tuple[float, float], most: int
) -> dict[str, Any]:
    import httpx

    limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as http:
        try:
            card = (await http.get("/v1/models")).raise_for_status().json()["data"][0]
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise typer.BadParameter(f"{url}: {error or type(error).__name__}", param_hint="--base-url") from None
        loads = shape.loads(await _vocabulary(http))
        moments = arrivals(len(loads), *rate, shape.seed)
        if shape.dataset == "trace" and rate[0] == float("inf"):
            moments = [load.arrival for load in loads]
        gate = asyncio.Semaphore(most)
        start = time.perf_counter()
        jobs = (
            _one(http, model or card["id"], load, start, moment, gate)
            for load, moment in zip(loads, moments, strict=True)
        )
        timelines = await asyncio.gather(*jobs)
        result = figures(timelines, time.perf_counter() - start)
    errors = [line.error for line in timelines if line.error]
    return {"model": model or card["id"], "max_concurrency": most, **result, **({"error": errors[0]} if errors else {})}


async def _vocabulary(http: httpx.AsyncClient) -> int:
    """Ids below this are in the vocabulary: found by asking, since the API has no field for it."""
    low, high = 1, 1 << 24
    while low + 1 < high:
        middle = (low + high) // 2
        answer = await http.post("/detokenize", json={"tokens": [middle]})
        low, high = (middle, high) if answer.status_code == 200 else (low, middle)
    return high


async def _one(
    http: httpx.AsyncClient, model: str, load: Load, start: float, moment: float, gate: asyncio.Semaphore
) -> Timeline:
    await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
    async with gate:
        line = Timeline(time.perf_counter() - start, len(load.prompt))
        body = {
            "model": model,
            "prompt": load.prompt,
            "max_tokens": load.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        try:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    line.error = (await answer.aread()).decode()[:300]
                    return line
                async for text in answer.aiter_lines():
                    if text.startswith("data: {"):
                        _note(line, json.loads(text[len("data: ") :]), time.perf_counter() - start)
        except Exception as error:  # whatever a connection can do; the others go on
            line.error = f"{type(error).__name__}: {error}"
        return line


def _note(line: Timeline, event: dict[str, Any], now: float) -> None:
    """An event may carry several tokens; each of them arrived now."""
    if "error" in event:
        line.error = str(event["error"]["message"])
    for choice in event.get("choices", ()):
        line.moments += [now] * len(choice.get("token_ids") or ())
    if event.get("usage"):
        line.cached_tokens = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
