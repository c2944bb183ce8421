"""POST /v1/chat/completions: turns that hit, usage in streams, tools, templates, isolation of salts and tenants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from live_server import BLOCK_SIZE, Live, read_events

from pagedkv.server.config import ServerConfig

PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Where does a block lie?"}]
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "maxLength": 8}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


def chat(live: Live, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    response = live.post(PATH, messages=messages, **{"max_tokens": 6, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_the_next_turn_hits_all_but_its_new_tokens(live: Live) -> None:
    messages = [{"role": "user", "content": "Tell me of blocks, at some length."}]
    first = chat(live, messages, max_tokens=20, ignore_eos=True, return_token_ids=True)
    reply = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]
    second = chat(live, messages, return_token_ids=True)
    old = first["usage"]["prompt_tokens"] + len(first["choices"][0]["token_ids"])
    assert cached(second) >= old - BLOCK_SIZE


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, None])
def test_b69_usage_in_a_stream(live: Live, options: dict[str, bool] | None) -> None:
    body = {"messages": ASK, "n": 2, "seed": 4, "temperature": 1, "max_tokens": 5}
    whole = chat(live, ASK, **{key: value for key, value in body.items() if key != "messages"})
    chunks = list(read_events(live, PATH, **body, **({} if options is None else {"stream_options": options})))
    wanted = bool(options and options.get("include_usage"))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1]["choices"] == []) is wanted
    if wanted:
        usage = chunks[-1]["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == whole["usage"][name]
    else:
        assert chunks[-1]["usage"] is None


def test_a_stream_joins_to_the_answer(live: Live) -> None:
    whole = chat(live, ASK, max_tokens=9, ignore_eos=True)["choices"][0]
    text, roles, reasons = "", [], []
    for chunk in read_events(live, PATH, messages=ASK, max_tokens=9, temperature=0, ignore_eos=True):
        for choice in chunk["choices"]:
            text += choice["delta"]["content"] or ""
            roles += [choice["delta"]["role"]] if choice["delta"]["role"] else []
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert (text, roles, reasons) == (whole["message"]["content"], ["assistant"], ["length"])


def test_logprobs_carry_bytes(live: Live) -> None:
    choice = chat(live, ASK, logprobs=True, top_logprobs=3, ignore_eos=True)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    whole = b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace")
    assert whole.rstrip("�") == choice["message"]["content"].rstrip("�")  # a character cut in half is not in the text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_a_forced_tool_call_follows_its_schema(live: Live, choice: Any) -> None:
    answer = chat(live, ASK, tools=[CLOCK], tool_choice=choice, max_tokens=200)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert call["function"]["name"] == "clock"
    assert list(json.loads(call["function"]["arguments"])) == ["zone"]
    parts = [
        call
        for chunk in read_events(
            live, PATH, messages=ASK, tools=[CLOCK], tool_choice=choice, max_tokens=200, temperature=0
        )
        for piece in chunk["choices"]
        for call in piece["delta"]["tool_calls"] or []
    ]
    assert [part["function"]["name"] for part in parts if part["function"]["name"]] == ["clock"]
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == json.loads(
        call["function"]["arguments"]
    )


def test_a_json_schema_is_followed(live: Live) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = chat(live, ASK, response_format=form, max_tokens=100)["choices"][0]["message"]["content"]
    assert set(json.loads(answer)) == {"ok"}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": None}]}),
        ("messages", {"messages": [{"role": "user"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        ("messages", {"messages": "hello"}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "rm"}}}),
        ("max_tokens", {"max_completion_tokens": -3}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
    ],
)
def test_b65_b87_bad_chats_are_400s(live: Live, field: str, fields: dict[str, Any]) -> None:
    response = live.post(PATH, **{"messages": ASK, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(field)


def test_b87_a_model_without_a_template_still_completes(open_server: Any, tmp_path: Path) -> None:
    from tiny_models import make_tiny_model

    model = make_tiny_model(tmp_path / "base")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with open_server(model=model) as live:
        response = live.post(PATH, messages=ASK)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
        assert live.complete("x")["choices"]


def test_b25_salts_and_tenants_share_nothing_and_cannot_be_widened(open_server: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a alice\nkey-b bob\n# a comment\nkey-c\n")

    def ask(live: Live, key: str, **fields: Any) -> int:
        body = {"messages": [{"role": "user", "content": "A secret of sorts. " * 6}], "max_tokens": 2, **fields}
        response = live.http.post(PATH, json=body, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
        return cached(response.json())

    with open_server(ServerConfig(api_keys_file=keys)) as live:
        assert ask(live, "key-a") == 0
        assert ask(live, "key-b") == 0
        assert ask(live, "key-b", cache_salt="5:alice:") == 0
        assert ask(live, "key-c", cache_salt="5:alice:") == 0
        assert ask(live, "key-a", cache_salt="mine") == 0
        assert ask(live, "key-a") > 0
        assert ask(live, "key-a", cache_salt="mine") > 0
        metrics = live.http.get("/metrics", headers={"Authorization": "Bearer key-c"}).text
        assert not any(word in metrics for word in ("alice", "mine", "key-a"))
    with open_server(ServerConfig(api_keys_file=keys, share_prefixes=True)) as live:
        assert ask(live, "key-a") == 0
        assert ask(live, "key-b") > 0
