"""A real Prometheus scrapes a running server as deploy/ says, and answers every query of the dashboard."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import Live

from pagedkv.server.config import ServerConfig

KEY = "scrape-key"
AUTH = {"Authorization": f"Bearer {KEY}"}
INSTALL = "apt-get install prometheus"
WINDOW = "10s"
PATIENCE = 45.0  # seconds until every query must have been answered; a second or three on an idle machine


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """Every query of every panel as Grafana would send it, with all models chosen."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [expr.replace("$model", ".*").replace("$__rate_interval", WINDOW) for expr in found]


def scrape_config(deploy: Path, folder: Path, port: int) -> Path:
    """deploy/prometheus.yml with its ``authorization`` uncommented, this server's port and a second between scrapes."""
    text = (deploy / "prometheus.yml").read_text()
    key_file = folder / "key"
    key_file.write_text(KEY)
    for old, new in (
        ("127.0.0.1:8000", f"127.0.0.1:{port}"),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("# authorization:", "authorization:"),
        ("#   credentials_file: /etc/pagedkv/scrape-key", f"  credentials_file: {key_file}"),
    ):
        assert text.count(old) == 1, f"deploy/prometheus.yml has no {old!r}"
        text = text.replace(old, new)
    path = folder / "prometheus.yml"
    path.write_text(text)
    return path


@contextmanager
def prometheus(program: str, config: Path, folder: Path) -> Iterator[httpx.Client]:
    """A Prometheus of our own on a free port of the loopback, with its data under ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={address}", "--log.level=warn"]
    with (folder / "log").open("w") as log, httpx.Client(base_url=f"http://{address}", timeout=10) as http:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield http
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def traffic(live: Live) -> Iterator[None]:
    """Completions one after another, each of them with a prefix that the one before it left."""
    stop = threading.Event()

    def run() -> None:
        body = {"prompt": "The cache keeps keys and values in blocks.", "max_tokens": 6, "temperature": 0}
        while not stop.is_set():
            response = live.http.post("/v1/completions", json=body, headers=AUTH)
            assert response.status_code == 200, response.text
            stop.wait(0.05)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def ask(http: httpx.Client, expr: str) -> list[dict[str, Any]]:
    """The series that answer a query; [] while Prometheus starts or has none."""
    try:
        response = http.get("/api/v1/query", params={"query": expr})
    except httpx.TransportError:
        return []
    if response.status_code == 503:  # it replays its log
        return []
    assert response.status_code == 200, f"{expr}: {response.text}"
    found: list[dict[str, Any]] = response.json()["data"]["result"]
    return found


def is_answered(series: list[dict[str, Any]]) -> bool:
    return bool(series) and all(math.isfinite(float(one["value"][1])) for one in series)


def test_the_scrape_config_is_sound(system_tool: Callable[[str, str], str], repository: Path) -> None:
    command = [system_tool("promtool", INSTALL), "check", "config", str(repository / "deploy/prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_metrics_pass_promtool(system_tool: Callable[[str, str], str], live: Live) -> None:
    """Prometheus's own linter reads the page. What it dislikes is vLLM's naming (colons, a histogram called _total)."""
    live.complete()
    page = live.http.get("/metrics").text
    command = [system_tool("promtool", INSTALL), "check", "metrics"]
    checked = subprocess.run(command, input=page, capture_output=True, text=True, timeout=30)
    said = [line for line in (checked.stdout + checked.stderr).splitlines() if line]
    known = re.compile(r"^(vllm|pagedkv):\S+ (metric names should not contain ':'|.*\"_total\" suffix)")
    assert [line for line in said if not known.match(line)] == []


def test_a_real_prometheus_answers_the_dashboard(
    system_tool: Callable[[str, str], str], open_server: Any, repository: Path, tmp_path: Path
) -> None:
    program = system_tool("prometheus", INSTALL)
    dashboard = json.loads((repository / "deploy/grafana.json").read_text())
    open_queries = set(expressions(dashboard))
    assert len(open_queries) >= 20
    with open_server(ServerConfig(api_key=(KEY,), served_model_name=("tiny",))) as live:
        config = scrape_config(repository / "deploy", tmp_path, int(live.url.rsplit(":", 1)[1]))
        with prometheus(program, config, tmp_path) as http:
            with traffic(live):
                end = time.monotonic() + PATIENCE
                while open_queries and time.monotonic() < end:
                    time.sleep(0.5)
                    open_queries = {expr for expr in open_queries if not is_answered(ask(http, expr))}
            assert not open_queries, (tmp_path / "log").read_text()
            live.settle()
            compare_with_the_engine(http, live)
            (variable,) = [v["query"]["query"] for v in dashboard["templating"]["list"] if v["name"] == "model"]
            metric, label = re.fullmatch(r"label_values\((\S+), (\S+)\)", variable).groups()  # type: ignore[union-attr]
            names = http.get(f"/api/v1/label/{label}/values", params={"match[]": metric}).json()["data"]
            assert names == ["tiny"]


def compare_with_the_engine(http: httpx.Client, live: Live) -> None:
    """Once a scrape has come after the last request, Prometheus holds the engine's own numbers."""
    stats = live.llm.stats()
    expected = {
        "vllm:generation_tokens_total": stats.generated_tokens,
        "vllm:prefix_cache_queries_total": stats.prefix_queries,
        "vllm:prefix_cache_hits_total": stats.prefix_hits,
        "vllm:e2e_request_latency_seconds_count": sum(stats.finished.values()),
        "sum(pagedkv:blocks)": stats.num_blocks,
        "vllm:kv_cache_usage_perc": 0,
        "up": 1,
    }
    assert stats.prefix_hits > 0
    end = time.monotonic() + 15
    while True:
        held = {expr: [float(one["value"][1]) for one in ask(http, expr)] for expr in expected}
        if held == {expr: [value] for expr, value in expected.items()}:
            return
        if time.monotonic() > end:
            pytest.fail(f"Prometheus holds {held}, the engine says {expected}")
        time.sleep(0.3)
