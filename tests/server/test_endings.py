"""Clients that go away, servers that are told to stop, engines that die: nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def test_b09_b66_a_stream_that_is_cut_ends_the_work(live: Live) -> None:
    before = live.llm.stats().generated_tokens
    with live.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(3):
            next(lines)
    wait_for(lambda: live.llm.stats().num_running == 0)
    assert live.llm.stats().generated_tokens - before < 400
    live.settle()


def raw_post(live: Live, path: str, body: dict[str, Any], version: str = "HTTP/1.1") -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST {path} {version}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def counts(caplog: pytest.LogCaptureFixture) -> list[tuple[int, int]]:
    """(prompt tokens, generated) of each generation in the access log, in the order of their ends."""
    lines = [record.getMessage() for record in caplog.records if record.name == "pagedkv.access"]
    found = [re.search(r": (\d+) prompt tokens \(\d+ cached\), (\d+) generated", line) for line in lines]
    return [(int(match[1]), int(match[2])) for match in found if match]


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_b66_a_client_that_waits_for_the_whole_answer_and_leaves(
    live: Live, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pagedkv.access")
    before = live.llm.stats().generated_tokens
    connection = raw_post(live, "/v1/completions", LONG, version)
    wait_for(lambda: live.llm.stats().generated_tokens > before + 3)
    connection.close()
    wait_for(lambda: live.llm.stats().num_running == 0)
    live.settle()
    wait_for(lambda: counts(caplog) != [])
    ((prompt, generated),) = counts(caplog)
    assert prompt == len(live.llm.tokenizer.encode(LONG["prompt"]))
    assert 0 < generated < 400


def test_b66_a_queued_request_whose_client_left_never_runs(open_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagedkv.access")
    with open_server(max_num_seqs=1) as live:
        first = raw_post(live, "/v1/completions", LONG)
        wait_for(lambda: live.llm.stats().num_running == 1)
        queued = raw_post(live, "/v1/completions", {**LONG, "prompt": "Never to be run"})
        wait_for(lambda: live.llm.stats().num_waiting == 1)
        queued.close()
        wait_for(lambda: live.llm.stats().num_waiting == 0)
        assert live.llm.stats().num_running == 1
        wait_for(lambda: counts(caplog) != [])
        assert counts(caplog) == [(len(live.llm.tokenizer.encode("Never to be run")), 0)]
        first.close()
        live.settle()
        assert live.llm.stats().finished["abort"] == 2
        assert live.complete("The next one runs")["choices"]


def test_b75_the_same_request_id_ten_times_at_once(live: Live) -> None:
    prompts = [f"Number {i} of ten." for i in range(10)]
    alone = [live.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        headers = {"X-Request-Id": "same"}
        body = {"prompt": prompts[i], "max_tokens": 6, "temperature": 0}
        texts[i] = httpx.post(f"{live.url}/v1/completions", json=body, headers=headers).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[i] for i in range(10)] == alone
    assert live.post("/v1/completions", prompt="x", request_id="y" * 10**6, max_tokens=1).status_code in (200, 400)


def test_a_full_queue_is_a_503_that_says_when_to_come_back(open_server: Any) -> None:
    with open_server(max_num_seqs=1, max_num_queued_reqs=1) as live:
        held = [raw_post(live, "/v1/completions", LONG)]
        wait_for(lambda: live.llm.stats().num_running == 1)
        held.append(raw_post(live, "/v1/completions", LONG))
        wait_for(lambda: live.llm.stats().num_waiting == 1)
        response = live.post("/v1/completions", **LONG)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "service_unavailable_error"
        for connection in held:
            connection.close()
        live.settle()


def test_b51_a_dead_engine_turns_health_red_and_fails_what_was_open(open_server: Any) -> None:
    with open_server() as live:
        connection = raw_post(live, "/v1/completions", LONG)
        wait_for(lambda: live.llm.stats().num_running == 1)
        live.llm.observe(None)  # type: ignore[arg-type]

        def die(engine: Any) -> None:
            engine.runner.run = None  # the next step raises

        live.llm._thread.call(die)
        wait_for(lambda: not live.llm.is_alive)
        assert live.http.get("/health").status_code == 503
        assert b" 503 " in connection.recv(4096).split(b"\r\n")[0]
        assert live.post("/v1/completions", prompt="x").status_code == 503
        connection.close()


# ---------------------------------------------------------------------------------------------- the process itself


@contextmanager
def process(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    command = [sys.executable, "-m", "pagedkv", "serve", str(model), "--port", "0", "--dtype", "float32"]
    command += ["--num-gpu-blocks-override", "128", "--block-size", "4", "--served-model-name", "tiny", *flags]
    served = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    lines: list[str] = []
    assert served.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(served.stderr.readline, "")))
    reader.start()
    try:
        found: list[str] = []

        def started() -> bool:
            assert served.poll() is None, "".join(lines)
            found[:] = re.findall(r"running on (http://[\d.]+:\d+)", "".join(lines))
            return bool(found)

        wait_for(started, 60)
        yield served, found[0], lines
    finally:
        if served.poll() is None:
            served.kill()
        served.wait()
        reader.join()
        served.stderr.close()


def test_b78_sigterm_drains_then_leaves_with_status_0(tiny_model: Callable[..., Path]) -> None:
    with process(tiny_model(), "--shutdown-timeout", "20") as (served, url, _), httpx.Client(timeout=30) as http:
        body = {**LONG, "max_tokens": 300, "stream": True}
        with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            served.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][len("data: ") :])["choices"][0]["finish_reason"] == "length"
        assert served.wait(20) == 0


def test_b78_what_outlives_the_timeout_is_told_so(tiny_model: Callable[..., Path]) -> None:
    with process(tiny_model(), "--shutdown-timeout", "0") as (served, url, _), httpx.Client(timeout=30) as http:
        with http.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            served.send_signal(signal.SIGTERM)
            rest = list(lines)
        reasons = [
            choice["finish_reason"]
            for line in rest
            if line != "data: [DONE]"
            for choice in json.loads(line[len("data: ") :])["choices"]
        ]
        assert reasons[-1] in ("abort", "length")
        assert served.wait(20) == 0
