"""Leaves a server under rough treatment for a while and looks at what is left. Loopback only; ends by itself.

    python bench/soak.py [--minutes 5] [--clients 64] [--model smollm2-135m]

64 clients ask, stream, cut streams at random, send bad requests, and share prefixes now and then, against a server
whose pool holds a quarter of what they need together. Afterwards: no 5xx but the intended 503, every block free or
only cached, nothing running, as many threads as before, memory flat over the last three fifths of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

PROMPT_TOKENS, NEW_TOKENS, BLOCK_SIZE = 240, 48, 16
WORDS = (
    "the",
    "cache",
    "keeps",
    "blocks",
    "of",
    "sixteen",
    "tokens",
    "and",
    "a",
    "table",
    "says",
    "where",
    "each",
    "lies",
)
BAD: list[dict[str, Any]] = [
    {"prompt": [10**9], "max_tokens": 4},
    {"prompt": "x", "temperature": -1},
    {"prompt": "", "max_tokens": 4},
    {"prompt": "x", "n": 1000},
    {"prompt": "word " * 20_000},
    {"prompt": "x", "logit_bias": {"nothing": 1}},
    {"prompt": "x", "model": "not-here"},
]


class Server:
    """``pagedkv serve`` as a process, with its figures read from outside."""

    def __init__(self, model: str, num_blocks: int) -> None:
        command = [sys.executable, "-m", "pagedkv", "serve", model, "--port", "0", "--status-interval", "0"]
        command += ["--num-gpu-blocks-override", str(num_blocks), "--max-num-queued-reqs", "40"]
        self._log = open("soak.log", "w+")  # noqa: SIM115  (lives as long as the process)
        self.process = subprocess.Popen(command, stderr=self._log, text=True)
        self.url = ""
        for _ in range(600):
            found = re.search(r"running on (\S+)", Path("soak.log").read_text())
            if found:
                self.url = found[1]
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError("the server did not start; see soak.log")

    def status(self) -> tuple[int, int]:
        """(resident bytes, threads)"""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        numbers = {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", text, re.MULTILINE)}
        return numbers["VmRSS"] * 1024, numbers["Threads"]

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return {sample.name + sample.labels.get("state", ""): sample.value for sample in samples}

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(90)


async def client(http: httpx.AsyncClient, draw: random.Random, end: float, seen: Counter[str]) -> None:
    while time.monotonic() < end:
        kind = draw.choices(("whole", "stream", "cut", "bad"), (3, 3, 3, 1))[0]
        try:
            await one(http, draw, kind, seen)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            seen[f"{kind} {type(error).__name__}"] += 1
        await asyncio.sleep(draw.uniform(0, 0.2))


async def one(http: httpx.AsyncClient, draw: random.Random, kind: str, seen: Counter[str]) -> None:
    if kind == "bad":
        answer = await http.post("/v1/completions", json=draw.choice(BAD))
        seen[f"bad {answer.status_code}"] += 1
        return
    words = random.Random(draw.randrange(6)).choices(WORDS, k=PROMPT_TOKENS // 2) + draw.choices(
        WORDS, k=PROMPT_TOKENS // 2
    )
    body = {"prompt": " ".join(words), "max_tokens": NEW_TOKENS, "temperature": 0.8, "n": draw.choice((1, 1, 1, 2))}
    if kind == "whole":
        answer = await http.post("/v1/completions", json=body)
        seen[f"whole {answer.status_code}"] += 1
        return
    after = draw.randrange(1, NEW_TOKENS) if kind == "cut" else 10**9
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        count = 0
        async for line in answer.aiter_lines():
            count += line.startswith("data: {")
            if count >= after:
                break
        seen[f"{kind} {answer.status_code}"] += 1


async def watch(server: Server, end: float, samples: list[tuple[float, int]]) -> None:
    while time.monotonic() < end:
        samples.append((time.monotonic(), server.status()[0]))
        await asyncio.sleep(1)


async def soak(server: Server, minutes: float, clients: int) -> tuple[Counter[str], list[tuple[float, int]]]:
    seen: Counter[str] = Counter()
    samples: list[tuple[float, int]] = []
    end = time.monotonic() + 60 * minutes
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
        jobs = [client(http, random.Random(i), end, seen) for i in range(clients)]
        await asyncio.gather(watch(server, end, samples), *jobs)
    return seen, samples


def growth(samples: list[tuple[float, int]]) -> float:
    """Bytes a minute over the last three fifths, by least squares."""
    tail = samples[len(samples) * 2 // 5 :]
    mean_x, mean_y = sum(x for x, _ in tail) / len(tail), sum(y for _, y in tail) / len(tail)
    spread = sum((x - mean_x) ** 2 for x, _ in tail) or 1.0
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in tail) / spread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    need = args.clients * -(-(PROMPT_TOKENS * 2 + NEW_TOKENS) // BLOCK_SIZE)
    server = Server(args.model, need // 4)
    try:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "warm", "max_tokens": 2}, timeout=60)
        threads = server.status()[1]
        seen, samples = asyncio.run(soak(server, args.minutes, args.clients))
        for _ in range(100):
            metrics = server.metrics()
            if not (metrics["vllm:num_requests_running"] or metrics["vllm:num_requests_waiting"]):
                break
            time.sleep(0.1)
        load = httpx.get(f"{server.url}/load").json()["server_load"]
        rss, threads_after = server.status()
    finally:
        status = server.stop()
    failures = {kind: n for kind, n in seen.items() if kind.split()[1][0] == "5" and kind.split()[1] != "503"}
    drift = growth(samples)
    result = {
        "answers": dict(sorted(seen.items())),
        "preemptions": metrics["vllm:num_preemptions_total"],
        "blocks": {state: metrics[f"pagedkv:blocks{state}"] for state in ("free", "cached", "in_use")},
        "running": metrics["vllm:num_requests_running"],
        "waiting": metrics["vllm:num_requests_waiting"],
        "active_http_requests_beside_ours": load - 1,
        "threads_before_after": [threads, threads_after],
        "rss_mib": rss / 2**20,
        "rss_growth_mib_per_minute": drift / 2**20,
        "exit_status": status,
    }
    good = {
        "no 5xx but 503": not failures,
        "ledger balanced": result["blocks"]["in_use"] == result["running"] == result["waiting"] == 0,
        "no request left": load == 1,
        "no thread left": threads_after <= threads + 1,
        "memory flat": drift < 0.01 * rss,
        "clean exit": status == 0,
    }
    print(json.dumps({**result, "good": good}, indent=1))
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
