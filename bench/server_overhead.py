"""What the server adds to the engine: per request, and at 64 streams at once.

    python bench/server_overhead.py [--model smollm2-135m]

1. One-token completions of a cached prompt, one after another: time at the client, less the time of the engine's own
   step for the same request (schedule + forward + sample + commit, from the engine's books). The rest is HTTP,
   tokenising, the queue between the threads, turning tokens into text, and the client itself.
2. 64 streams of 64 tokens at once against the same work given to ``LLM.generate``: tokens per second of each, and of
   the server with the client's CPU time taken off (client and server share the cores here).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx
import uvicorn

from pagedkv import LLM, AsyncLLM, SamplingParams
from pagedkv.server.app import create_app

PROMPT = "The cache keeps keys and values in blocks of sixteen tokens, and a table says where each block lies. " * 6
STREAMS, NEW = 64, 64
CLIENT = """
import asyncio, json, resource, sys, time, httpx
url, streams, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
async def one(http, i):
    body = {"prompt": [1000 + i] * 64, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_raw():
            pass
async def main():
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=streams)) as http:
        await http.get("/health")
        used, begin = time.process_time(), time.perf_counter()
        await asyncio.gather(*(one(http, i) for i in range(streams)))
        print(json.dumps([time.perf_counter() - begin, time.process_time() - used]))
asyncio.run(main())
"""


def engine_seconds(llm: AsyncLLM) -> float:
    stats = llm.stats()
    parts = ("schedule", "build", "forward", "sample", "commit")
    return sum(getattr(stats, f"{part}_seconds") for part in parts)


def one_by_one(url: str, llm: AsyncLLM, rounds: int = 100) -> dict[str, float]:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "temperature": 0}).encode()
    total, beyond = [], []
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=60)) as http:  # a lean client: its time counts too

        def ask() -> None:
            http.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = http.getresponse()
            answer.read()
            assert answer.status == 200

        for _ in range(5):
            ask()
        for _ in range(rounds):
            before, begin = engine_seconds(llm), time.perf_counter()
            ask()
            seconds = time.perf_counter() - begin
            total.append(1e3 * seconds)
            beyond.append(1e3 * (seconds - (engine_seconds(llm) - before)))
    return {
        "median_request_ms": statistics.median(total),
        "median_beyond_the_step_ms": statistics.median(beyond),
        "p90_beyond_the_step_ms": sorted(beyond)[int(0.9 * rounds)],
    }


def offline(model: str, options: dict[str, Any]) -> float:
    llm = LLM(model, **options)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    prompts = [[1000 + i] * 64 for i in range(STREAMS)]
    llm.generate(prompts[:2], SamplingParams(max_tokens=2), use_tqdm=False)
    rates = []
    for _ in range(3):
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rates.append(STREAMS * NEW / (time.perf_counter() - begin))
    return statistics.median(rates)


def streamed(url: str, reset: Any) -> tuple[float, float]:
    """(tokens a second as measured, the same with the client's CPU time taken off), medians of three."""
    plain, less_client = [], []
    for _ in range(3):
        reset()
        command = [sys.executable, "-c", CLIENT, url, str(STREAMS), str(NEW)]
        wall, used = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        plain.append(STREAMS * NEW / wall)
        less_client.append(STREAMS * NEW / (wall - used / 2))  # its CPU time, spread over the two cores both use
    return statistics.median(plain), statistics.median(less_client)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    model = parser.parse_args().model
    options: dict[str, Any] = {"num_gpu_blocks_override": 1024, "max_model_len": 2048}
    base = offline(model, options)
    llm = AsyncLLM(model, **options)
    server = uvicorn.Server(uvicorn.Config(create_app(llm), port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        result = one_by_one(url, llm)
        plain, less_client = streamed(url, lambda: httpx.post(f"{url}/reset_prefix_cache").raise_for_status())
    finally:
        server.should_exit = True
        thread.join()
        llm.shutdown()
    result |= {
        "offline_tok_s": base,
        "server_tok_s": plain,
        "server_over_offline": plain / base,
        "server_less_client_over_offline": less_client / base,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
