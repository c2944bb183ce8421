"""Who is let in, what is echoed, and the routes beside generation."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from live_server import Live

import pagedkv
from pagedkv.server import admin, cache_map, chat, completions, metrics
from pagedkv.server.auth import ApiKeys
from pagedkv.server.config import ServerConfig
from pagedkv.server.errors import field_of


@pytest.fixture(scope="module")
def locked(open_server: Any) -> Iterator[Live]:
    config = ServerConfig(api_key=("k1", "k2"), allowed_origins=("http://app.example",), served_model_name=("tiny",))
    with open_server(config) as server:
        yield server


ROUTES = [
    (method, route.path.replace("{name:path}", "tiny"))
    for part in (completions, chat, admin, metrics, cache_map)
    for route in part.router.routes
    if isinstance(route, APIRoute)
    for method in route.methods
]
DOCS = [("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/redoc"), ("GET", "/nothing")]
BASIC = "Basic " + base64.b64encode(b"anyone:k2").decode()


@pytest.mark.parametrize(("method", "path"), ROUTES + DOCS)
def test_b77_every_route_but_health_needs_a_key(locked: Live, method: str, path: str) -> None:
    open_ = path in ("/health", "/ping")
    for headers in ({}, {"Authorization": "Bearer k3"}, {"Authorization": "Bearer"}, {"Authorization": "k1"}):
        response = locked.http.request(method, path, headers=headers)
        assert (response.status_code != 401) is open_
        if not open_:
            assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["//v1/models", "/v1/../v1/models", "/health/../v1/models", "/V1/models"])
def test_b77_no_spelling_of_a_path_leads_round_the_key(locked: Live, path: str) -> None:
    assert locked.http.get(path).status_code == 401
    assert locked.http.get("/v1/models", params={"api_key": "k1", "key": "k1"}).status_code == 401


@pytest.mark.parametrize("header", ["Bearer k1", "bearer k2", "BEARER k1", BASIC])
def test_each_key_opens(locked: Live, header: str) -> None:
    assert locked.http.get("/v1/models", headers={"Authorization": header}).status_code == 200


def test_b77_a_preflight_needs_no_key_and_only_known_origins_pass(locked: Live) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    response = locked.http.options("/v1/completions", headers={"Origin": "http://app.example", **asked})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://app.example"
    response = locked.http.options("/v1/completions", headers={"Origin": "http://other.example", **asked})
    assert "access-control-allow-origin" not in response.headers


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ApiKeys.load(("secret",)))


@pytest.mark.parametrize(
    ("location", "field"),
    [
        (("body", "messages", 0, "content", "str"), "messages.0.content"),
        (("body", "prompt", "list[int]", 0), "prompt.0"),
        (("body",), None),
    ],
)
def test_field_of(location: tuple[str | int, ...], field: str | None) -> None:
    assert field_of(location) == field


def test_models_version_load_and_health(live: Live) -> None:
    (card,) = live.http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", live.llm.max_model_len)
    assert live.http.get("/v1/models/tiny").json() == card
    assert live.http.get("/v1/models/other").status_code == 404
    assert live.http.get("/version").json() == {"version": pagedkv.__version__}
    assert live.http.get("/load").json()["server_load"] >= 1
    for path in ("/health", "/ping"):
        assert live.http.get(path).json() == {"status": "ok"}
    assert live.http.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert live.http.delete("/v1/models").json()["error"]["code"] == 405


def test_tokenize_and_detokenize(live: Live) -> None:
    text = "Blocks of sixteen."
    answer = live.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert live.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}
    chat_ids = live.post("/tokenize", messages=[{"role": "user", "content": text}]).json()["tokens"]
    assert len(chat_ids) > answer["count"]
    for bad in ({}, {"prompt": "a", "messages": []}, {"prompt": 5}):
        assert live.post("/tokenize", **bad).status_code == 400
    for tokens in ([-1], [320], [2**63], ["x"], [1.5]):
        assert live.post("/detokenize", tokens=tokens).status_code == 400


def test_b16_reset_empties_the_cache_and_counts_what_is_in_use(live: Live) -> None:
    live.complete("To be forgotten soon, all of it.")
    live.settle()
    assert live.post("/reset_prefix_cache").json() == {"success": True, "blocks_in_use": 0}
    again = live.complete("To be forgotten soon, all of it.")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("application/x-www-form-urlencoded", "Content-Type: application/json, not application/x-www-form-urlencoded"),
        (None, "Content-Type: application/json, which is missing"),
        ("application/json", None),
        ("application/json; charset=utf-8", None),
    ],
)
def test_a_body_of_another_kind_is_told_which_header_it_lacks(live: Live, kind: str | None, said: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = live.http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    if said is None:
        assert response.status_code == 200
    else:
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
    empty = live.http.post("/v1/completions", content=b"", headers=headers)
    assert (empty.status_code, empty.json()["error"]["type"]) == (400, "invalid_request_error")
