"""Explanations over HTTP, and the record of traffic that replay reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.insight.record import TraceRecorder
from pagedkv.insight.replay import replay_sequential
from pagedkv.insight.trace import read_trace
from pagedkv.server.config import ServerConfig

TEXT = "one two three four five six seven eight nine ten"


def test_a_request_that_asks_is_explained_by_its_id(live: Any) -> None:
    live.complete(TEXT)
    answer = live.complete(TEXT, explain=True)
    found = live.http.get(f"/v1/requests/{answer['id']}/explain").json()
    assert found["id"] == answer["id"]
    (explanation,) = found["explanations"]
    assert explanation["reason"] == "last token rule"
    assert explanation["cached_tokens"] == explanation["prompt_tokens"] - 1 == explanation["position"]
    assert "its logits" in explanation["text"]
    assert TEXT not in json.dumps(found)


def test_each_prompt_of_a_request_is_explained_streamed_or_not(live: Any) -> None:
    prompts = ["alpha beta gamma delta", "epsilon zeta eta theta"]
    body = {"prompt": prompts, "max_tokens": 2, "explain": True, "stream": True, "request_id": "mine"}
    with live.http.stream("POST", "/v1/completions", json=body) as response:
        assert "[DONE]" in response.read().decode()
    assert len(live.http.get("/v1/requests/cmpl-mine/explain").json()["explanations"]) == 2


def test_who_did_not_ask_finds_nothing(live: Any) -> None:
    answer = live.complete(TEXT)
    response = live.http.get(f"/v1/requests/{answer['id']}/explain")
    assert response.status_code == 404
    assert "explain" in response.json()["error"]["message"]


def test_a_recording_replays_with_the_sharing_it_saw(open_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    with open_server(ServerConfig(record=path)) as live:
        prompts = [list(range(3, 40)), [*range(3, 36), 50, 51], [60] * 20]
        for prompt in prompts:
            live.complete(prompt)
        live.complete(prompts[0], cache_salt="another")
    trace = read_trace(path)
    assert trace.chunk_tokens == 16
    assert [request.num_prompt_tokens for request in trace.requests] == [37, 35, 20, 37]
    assert all(request.num_output_tokens == 6 for request in trace.requests)
    first, second, third, salted = (list(request.chunks) for request in trace.requests)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert set(first).isdisjoint(third)
    assert set(first).isdisjoint(salted)
    assert replay_sequential(trace).num_hit_tokens == 32
    text = path.read_text()
    assert "another" not in text


def test_a_recording_never_goes_over_a_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text("mine")
    with pytest.raises(InvalidRequest, match="File exists"):
        TraceRecorder(path)
    assert path.read_text() == "mine"


def test_two_recordings_of_the_same_prompt_cannot_be_joined(tmp_path: Path) -> None:
    lines = []
    for name in ("a.jsonl", "b.jsonl"):
        recorder = TraceRecorder(tmp_path / name)
        recorder.add(0.0, [1] * 40, 1)
        recorder.close()
        lines.append((tmp_path / name).read_text().splitlines()[1])
    assert lines[0] != lines[1]
