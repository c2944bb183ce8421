"""The process's own words (status line, banner) and what ServerConfig makes of the application."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live_server import Live

from pagedkv.engine.metrics import EngineStats
from pagedkv.errors import InvalidRequest
from pagedkv.server.config import ServerConfig
from pagedkv.server.run import StatusLine, banner


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def idle(live: Live) -> EngineStats:
    live.settle()
    return live.llm.stats()


def test_the_status_line_counts_what_happened_since_the_last_one(idle: EngineStats) -> None:
    clock, now = Clock(), [idle]
    line = StatusLine(lambda: now[0], clock)
    clock.now += 10
    now[0] = replace(
        idle,
        num_running=3,
        num_waiting=2,
        blocks_in_use=idle.num_blocks // 4,
        num_steps=idle.num_steps + 40,
        prefix_queries=idle.prefix_queries + 200,
        prefix_hits=idle.prefix_hits + 150,
        prefill_tokens=idle.prefill_tokens + 500,
        generated_tokens=idle.generated_tokens + 125,
    )
    assert line.next() == (
        "running 3, waiting 2, KV in use 25.0%, prefix hits 75.0%, prefill 50 tok/s, generated 12.5 tok/s"
    )
    clock.now += 10  # they still run, but nothing was computed and nothing asked the cache
    assert line.next() == ("running 3, waiting 2, KV in use 25.0%, prefix hits -, prefill 0 tok/s, generated 0.0 tok/s")


def test_an_idle_server_says_nothing_and_the_last_step_is_told_once(idle: EngineStats) -> None:
    clock, now = Clock(), [idle]
    line = StatusLine(lambda: now[0], clock)
    assert line.next() is None  # no time has passed, nothing is divided by 0
    now[0] = replace(idle, num_steps=idle.num_steps + 1, generated_tokens=idle.generated_tokens + 4)
    clock.now += 2
    assert line.next() == "running 0, waiting 0, KV in use 0.0%, prefix hits -, prefill 0 tok/s, generated 2.0 tok/s"
    clock.now += 10
    assert line.next() is None


@pytest.mark.parametrize(
    ("config", "url", "keys"),
    [
        (ServerConfig(), "http://127.0.0.1:8000/v1", "no API key is asked for"),
        (ServerConfig(host="::1", port=9), "http://[::1]:9/v1", "no API key is asked for"),
        (ServerConfig(api_key=("hidden",)), "http://127.0.0.1:8000/v1", "an API key is asked for"),
        (ServerConfig(api_keys_file=Path("keys")), "http://127.0.0.1:8000/v1", "an API key is asked for"),
    ],
)
def test_the_banner_says_what_is_served_where_and_shows_no_key(config: ServerConfig, url: str, keys: str) -> None:
    llm: Any = SimpleNamespace(banner=["tiny: llama", "KV pool: 128 blocks"])
    text = banner(llm, config)
    lines = [line.strip() for line in text.splitlines()]
    assert lines[:2] == llm.banner
    assert lines[2].startswith(url)
    assert f"({keys})" in lines[2]
    assert url.replace("/v1", "/cache") in lines[3]
    assert url.replace("/v1", "/metrics") in lines[3]
    assert "hidden" not in text


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"allowed_origins": ("*",), "allow_credentials": True}, "allowed_origins"),
        ({"allowed_origins": ("http://a.example", "*"), "allow_credentials": True}, "allowed_origins"),
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"max_body_bytes": 1023}, "max_body_bytes"),
        ({"shutdown_timeout": -0.5}, "shutdown_timeout"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
        ({"root_path": "/"}, "root_path"),
    ],
)
def test_b77_a_setting_that_cannot_be_meant_is_refused_at_the_start(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ServerConfig(**options)
    assert refused.value.field == field


def test_any_origin_without_credentials_and_one_origin_with_them(open_server: Any) -> None:
    asked = {"Origin": "http://app.example", "Access-Control-Request-Method": "POST"}
    for origins, credentials, origin in (
        (("*",), False, "*"),
        (("http://app.example",), True, "http://app.example"),
    ):
        with open_server(ServerConfig(allowed_origins=origins, allow_credentials=credentials)) as live:
            headers = live.http.options("/v1/completions", headers=asked).headers
            assert headers["access-control-allow-origin"] == origin
            assert headers.get("access-control-allow-credentials") == ("true" if credentials else None)


def test_without_origins_there_are_no_cors_headers(live: Live) -> None:
    answer = live.http.get("/v1/models", headers={"Origin": "http://app.example"})
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_every_served_name_answers_under_itself_and_the_first_is_the_default(open_server: Any) -> None:
    with open_server(ServerConfig(served_model_name=("first", "second"))) as live:
        cards = live.http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["first", "second"]
        assert live.complete()["model"] == "first"
        for name in ("first", "second"):
            assert live.complete(model=name)["model"] == name
        refused = live.post("/v1/completions", prompt="x", model="third", max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
        assert 'model_name="first"' in live.http.get("/metrics").text  # one label, whatever name a request uses
        assert 'model_name="second"' not in live.http.get("/metrics").text


def test_without_a_served_name_the_model_is_called_as_it_was_named(open_server: Any) -> None:
    with open_server(ServerConfig()) as live:
        (card,) = live.http.get("/v1/models").json()["data"]
        assert card["id"] == live.llm.model_name
        assert live.complete(model=card["id"])["model"] == card["id"]


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_root_path_with_a_proxy_that_strips_it_and_one_that_does_not(open_server: Any, prefix: str) -> None:
    """nginx's two ways: ``proxy_pass`` with a path takes the prefix off, without one it stays."""
    with open_server(ServerConfig(root_path="/llm", served_model_name=("tiny",))) as live:
        assert live.http.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "tiny"
        answer = live.post(f"{prefix}/v1/completions", prompt="The cache", max_tokens=2)
        assert answer.status_code == 200
        assert live.http.get(f"{prefix}/cache").status_code == 200
        assert "/llm/openapi.json" in live.http.get(f"{prefix}/docs").text
        assert live.http.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_b77_behind_a_prefix_only_health_is_open(open_server: Any) -> None:
    with open_server(ServerConfig(root_path="/llm", api_key=("k",))) as live:
        for path in ("/health", "/ping"):
            assert live.http.get(path).status_code == live.http.get(f"/llm{path}").status_code == 200
        for path in ("/v1/models", "/llm/v1/models", "/llm/cache", "/llm/health/../v1/models", "/llm/llm/health"):
            assert live.http.get(path).status_code == 401
