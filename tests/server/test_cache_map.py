"""The cache map: what its stream says is what the pool holds, and a real browser shows the same figures."""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import BLOCK_SIZE, NUM_BLOCKS, Live, slowed
from prometheus_client.parser import text_string_to_metric_families

from pagedkv.server.cache_map import changed_runs
from pagedkv.server.config import ServerConfig

PREFIX = "A prefix that several prompts share, word for word. "


@given(st.lists(st.booleans(), max_size=300), st.integers(0, 20))
def test_runs_cover_every_change_and_begin_and_end_with_one(changed: list[bool], gap: int) -> None:
    runs = changed_runs(np.array(changed, bool), gap)
    covered = {i for a, b in runs for i in range(a, b)}
    assert covered >= {i for i, flag in enumerate(changed) if flag}
    assert all(changed[a] and changed[b - 1] for a, b in runs)
    assert all(after[0] - before[1] >= gap for before, after in itertools.pairwise(runs))


class Map:
    """What a page would know after the events so far."""

    def __init__(self, live: Live) -> None:
        self._stream = live.http.stream("GET", "/cache/events")
        self._lines = self._stream.__enter__().iter_lines()
        self.states = np.zeros(NUM_BLOCKS, np.uint8)

    def next(self) -> dict[str, Any]:
        for line in self._lines:
            if line.startswith("data: "):
                event: dict[str, Any] = json.loads(line[len("data: ") :])
                for run in event["blocks"]:
                    state = np.frombuffer(base64.b64decode(run["state"]), np.uint8)
                    self.states[run["start"] : run["start"] + len(state)] = state
                return event
        raise AssertionError("the stream ended")

    def close(self) -> None:
        self._stream.__exit__(None, None, None)


@pytest.fixture
def shown(open_server: Any) -> Iterator[tuple[Live, Map]]:
    with open_server() as live:
        page = Map(live)
        yield live, page
        page.close()


def test_the_stream_says_what_the_pool_holds(shown: tuple[Live, Map]) -> None:
    live, page = shown
    first = page.next()
    assert first["pool"]["num_blocks"] == NUM_BLOCKS
    for tail in ("One.", "Another.", "A third."):
        live.complete(PREFIX + tail)
    live.settle()
    for _ in range(8):
        event = page.next()
    stats = live.llm.stats()
    cached, owners = page.states >> 7, page.states & 0x7F
    assert owners.sum() == 0
    assert cached.sum() == stats.blocks_cached == event["stats"]["num_cached_only"]
    assert event["stats"]["prefix_hits"] == stats.prefix_hits > 0
    nodes = event.get("tree") or page.next().get("tree") or []
    for _ in range(6):
        nodes = nodes or page.next().get("tree", [])
    shared = nodes[0]
    assert shared["hits"] == 2
    assert "text" not in shared
    assert sum(len(node["blocks"]) for node in nodes) == stats.blocks_cached
    assert shared["num_tokens"] == len(shared["blocks"]) * BLOCK_SIZE


def test_running_requests_show_their_tables(shown: tuple[Live, Map]) -> None:
    live, page = shown
    body = {"prompt": PREFIX, "max_tokens": 300, "n": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    with slowed(live, 0.05), live.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: a stream that nobody reads is closed
        next(lines)
        requests: list[dict[str, Any]] = []
        for _ in range(20):
            requests = page.next()["requests"]
            if len(requests) == 2:
                break
        assert len(requests) == 2
        common = set(requests[0]["blocks"]) & set(requests[1]["blocks"])
        assert common
        assert all(page.states[block] & 0x7F == 2 for block in common)
    live.settle()


def test_text_is_shown_only_when_told_to(open_server: Any) -> None:
    for show in (False, True):
        with open_server(ServerConfig(cache_map_show_text=show)) as live:
            live.complete(PREFIX)
            live.settle()
            page = Map(live)
            text = json.dumps(page.next())
            page.close()
            assert ("several prompts" in text) is show


@pytest.fixture
def browser(system_tool: Callable[[str, str], str], tmp_path: Path) -> Iterator[Any]:
    chromium = system_tool("chromium", "apt-get install chromium chromium-driver")
    driver_path = system_tool("chromedriver", "apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--window-size=1200,900", f"--user-data-dir={tmp_path}"),
    ):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    yield driver
    driver.quit()


def figures(browser: Any) -> dict[str, float]:
    """The numbers on the page, as shown to people: separators and units taken off."""
    ids = ("running", "waiting", "usage", "hits", "queries", "num_free", "num_cached", "num_in_use")
    script = "return Object.fromEntries(arguments[0].map((id) => [id, document.getElementById(id).textContent]))"
    texts: dict[str, str] = browser.execute_script(script, ids)
    return {name: float(text.replace(",", "").replace("%", "").replace("-", "nan")) for name, text in texts.items()}


def scraped(live: Live) -> dict[str, float]:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(live.http.get("/metrics").text):
        for sample in family.samples:
            values[sample.name + sample.labels.get("state", "")] = sample.value
    return values


def agree(page: dict[str, float], metrics: dict[str, float], live: Live) -> bool:
    stats = live.llm.stats()
    expected = {
        "running": (metrics["vllm:num_requests_running"], stats.num_running),
        "waiting": (metrics["vllm:num_requests_waiting"], stats.num_waiting),
        "hits": (metrics["vllm:prefix_cache_hits_total"], stats.prefix_hits),
        "queries": (metrics["vllm:prefix_cache_queries_total"], stats.prefix_queries),
        "num_free": (metrics["pagedkv:blocksfree"], stats.blocks_free),
        "num_cached": (metrics["pagedkv:blockscached"], stats.blocks_cached),
        "num_in_use": (metrics["pagedkv:blocksin_use"], stats.blocks_in_use),
        "usage": (round(100 * metrics["vllm:kv_cache_usage_perc"], 1), round(100 * stats.kv_cache_usage, 1)),
    }
    return all(page[name] == a == b for name, (a, b) in expected.items())


def test_a_browser_shows_the_figures_of_the_metrics_while_requests_run(browser: Any, open_server: Any) -> None:
    with open_server(max_num_seqs=2) as live:
        browser.get(f"{live.url}/cache")
        live.complete(PREFIX + "Before.")
        gate = threading.Event()

        def stream() -> None:
            body = {"prompt": PREFIX + "Long.", "max_tokens": 300, "n": 2, "ignore_eos": True, "stream": True}
            with live.http.stream("POST", "/v1/completions", json=body) as response:
                for _ in response.iter_lines():
                    if gate.is_set():
                        return

        client = threading.Thread(target=stream)
        client.start()
        seen: list[tuple[dict[str, float], dict[str, float]]] = []
        with slowed(live, 1.0):
            for _ in range(60):
                seen.append((figures(browser), scraped(live)))
                if seen[-1][1]["vllm:num_requests_running"] and agree(*seen[-1], live):
                    break
                time.sleep(0.1)
            else:
                pytest.fail(f"the page and the metrics never agreed: {seen[-1]}")
            gate.set()
        assert seen[-1][0]["running"] >= 1
        client.join()
        live.settle()


def test_a_keyboard_is_enough(browser: Any, open_server: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    with open_server() as live:
        live.complete(PREFIX)
        live.settle()
        browser.get(f"{live.url}/cache")
        for _ in range(100):
            if browser.execute_script("return pool.num_blocks") == NUM_BLOCKS:
                break
            time.sleep(0.05)
        canvas = browser.find_element("id", "map")
        canvas.send_keys(Keys.ARROW_RIGHT)
        for _ in range(50):
            if "cached only" in browser.find_element("id", "detail").text:
                break
            time.sleep(0.05)
        assert browser.find_element("id", "detail").text.startswith("Block 0: cached only")
        canvas.send_keys(Keys.ESCAPE)
        assert browser.find_element("id", "detail").text.startswith("Point at a block")
        for width in (1200, 390):
            metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.get_log("browser") == []


def test_a_large_pool_is_drawn_without_jank(browser: Any, open_server: Any) -> None:
    with open_server() as live:
        browser.get(f"{live.url}/cache")
        script = """
            const n = 100000, done = arguments[0];
            pool = {...pool, num_blocks: n};
            [owners, cached, idle] = [new Uint8Array(n), new Uint8Array(n), new Uint16Array(n)];
            layout();
            const times = [];
            function once(i) {
              for (let k = 0; k < 2000; k++) owners[(i * 7919 + k * 31) % n] = (i + k) % 3;
              dirty = true;
              const begin = performance.now();
              requestAnimationFrame(() => setTimeout(() => {
                times.push(performance.now() - begin);
                i < 20 ? once(i + 1) : done(times.sort((a, b) => a - b)[10]);
              }));
            }
            once(0);"""
        browser.set_script_timeout(60)
        assert browser.execute_async_script(script) is not None  # it ends; the time is for people to read
        assert browser.execute_script("return map.width > 0 && map.height > 0")
