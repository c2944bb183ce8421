"""What the server adds to the engine: per request, and at 64 streams at once.

    python bench/server_overhead.py [--model smollm2-135m]

1. One-token completions of a cached prompt, one after another: time at the client, less the time of the engine's own
   step for the same request (schedule + forward + sample + commit, from the engine's books). The rest is HTTP,
   tokenising, the queue between the threads, turning tokens into text, and the client: a process of its own, as
   clients are, that reads no more than it must. Its CPU time is printed.
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
from typing import Any

import httpx
import uvicorn

from pagedkv import LLM, AsyncLLM, SamplingParams
from pagedkv.server.app import create_app

PROMPT = "The cache keeps keys and values in blocks of sixteen tokens, and a table says where each block lies. " * 6
STREAMS, NEW = 64, 64
WARM_UP = 10
ASKER = """
import json, socket, sys, time
host, port = sys.argv[1].split(":")
body = sys.argv[2].encode()
end = b"\\r\\n"
kind = "Content-Type: application/json"
head = ["POST /v1/completions HTTP/1.1", f"Host: {host}", kind, f"Content-Length: {len(body)}"]
request = end.join(line.encode() for line in head) + end * 2 + body
connection = socket.create_connection((host, int(port)), timeout=60)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in sys.stdin:
    used, begin = time.process_time(), time.perf_counter()
    connection.sendall(request)
    answer = b""
    while end * 2 not in answer:
        answer += connection.recv(65536)
    headers, _, rest = answer.partition(end * 2)
    length = next(int(line[15:]) for line in headers.lower().split(end) if line.startswith(b"content-length:"))
    while len(rest) < length:
        rest += connection.recv(65536)
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    assert headers.startswith(b"HTTP/1.1 200") and json.loads(rest)["usage"]["completion_tokens"] == 1
    print(json.dumps([seconds, used]), flush=True)
"""
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
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "temperature": 0})
    total, beyond, client = [], [], []
    command = [sys.executable, "-c", ASKER, url.removeprefix("http://"), body]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as asker:
        assert asker.stdin is not None
        assert asker.stdout is not None
        for _ in range(rounds + WARM_UP):
            before = engine_seconds(llm)
            asker.stdin.write("go\n")
            seconds, used = json.loads(asker.stdout.readline())
            total.append(1e3 * seconds)
            beyond.append(1e3 * (seconds - (engine_seconds(llm) - before)))
            client.append(1e3 * used)
        asker.stdin.close()
    total, beyond, client = total[WARM_UP:], beyond[WARM_UP:], client[WARM_UP:]
    return {
        "median_request_ms": statistics.median(total),
        "median_beyond_the_step_ms": statistics.median(beyond),
        "p90_beyond_the_step_ms": sorted(beyond)[int(0.9 * rounds)],
        "median_client_cpu_ms": statistics.median(client),  # part of the two figures above
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
    server = uvicorn.Server(uvicorn.Config(create_app(llm), port=0, log_config=None, access_log=False))
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
