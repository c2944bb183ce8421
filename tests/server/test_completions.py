"""POST /v1/completions: what comes back, and that no bad value is anything but a 400."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from live_server import Live, read_events

PROMPT = "A block table says where each block of a sequence lies."


def test_an_answer_has_openai_s_shape(live: Live) -> None:
    answer = live.complete(PROMPT, max_tokens=5, ignore_eos=True)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


def test_a_repeated_prompt_reports_its_cached_tokens(live: Live) -> None:
    text = "Counted twice: " + PROMPT
    first, second = live.complete(text), live.complete(text)
    assert second["choices"] == first["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1


def test_the_four_spellings_of_a_prompt(live: Live) -> None:
    ids = live.post("/tokenize", prompt=PROMPT).json()["tokens"]
    text = live.complete(PROMPT)["choices"][0]["text"]
    assert live.complete(ids)["choices"][0]["text"] == text
    for several in ([PROMPT, "The"], [ids, [5, 6, 7]]):
        choices = live.complete(several, n=2, seed=1)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert choices[0]["text"] == text


def test_a_stream_joins_to_the_whole_answer(live: Live) -> None:
    whole = live.complete(PROMPT, n=2, temperature=1, seed=5, logprobs=2, echo=True, max_tokens=9)
    body = {"prompt": PROMPT, "n": 2, "temperature": 1, "seed": 5, "logprobs": 2, "echo": True, "max_tokens": 9}
    texts, offsets, reasons = {0: "", 1: ""}, {0: [], 1: []}, {}
    for event in read_events(live, "/v1/completions", **body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            offsets[choice["index"]] += choice["logprobs"]["text_offset"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert offsets[choice["index"]] == choice["logprobs"]["text_offset"]
        assert reasons[choice["index"]] == choice["finish_reason"]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_b72_text_offset_is_where_the_token_starts(live: Live, echo: bool, logprobs: int) -> None:
    answer = live.complete("café über 🙂 end", echo=echo, logprobs=logprobs, ignore_eos=True)
    choice = answer["choices"][0]
    report = choice["logprobs"]
    lengths = {len(report[name]) for name in ("text_offset", "tokens", "token_logprobs", "top_logprobs")}
    assert lengths == {6 + (answer["usage"]["prompt_tokens"] if echo else 0)}
    for offset, token in zip(report["text_offset"], report["tokens"], strict=True):
        if "�" not in token and not token.startswith("<|"):
            assert choice["text"][offset : offset + len(token)] == token
    if echo:
        assert report["token_logprobs"][0] is None


def test_b71_prompt_logprobs_do_not_come_from_the_cache(live: Live) -> None:
    answers = []
    for round_ in range(3):
        answers.append(live.complete(PROMPT, echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"])
        live.complete(PROMPT, max_tokens=3 + round_)
    assert answers[0] == answers[1] == answers[2]
    scored = live.complete(PROMPT, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert scored[0] is None
    values = [max(e["logprob"] for e in entry.values()) for entry in scored[1:]]
    assert all(math.isfinite(value) for value in values)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"allowed_token_ids": [40, 41]},
        {"logit_bias": {"40": -100}},
        {"temperature": 0, "echo": True},
    ],
)
def test_b73_logprobs_are_numbers(live: Live, fields: dict[str, Any]) -> None:
    answer = live.complete(PROMPT, logprobs=5, **{"temperature": 1, "seed": 1, **fields})
    json.dumps(answer, allow_nan=False)


BAD: list[tuple[str, Any]] = [
    ("prompt", [-1]),
    ("prompt", [320]),
    ("prompt", [2**31]),
    ("prompt", [2**63]),
    ("prompt", [1.5]),
    ("prompt", ["5", 5]),
    ("prompt", [True]),
    ("prompt", None),
    ("prompt", [[[1]]]),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", ""),
    ("prompt", [""]),
    ("prompt", "word " * 2000),
    ("prompt", ["x"] * 50_000),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1e12),
    ("max_tokens", "5"),
    ("min_tokens", 7),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 10**6),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("top_k", -2),
    ("min_p", 2),
    ("logprobs", 10**6),
    ("logprobs", -1),
    ("stop", ["x"] * 10_000),
    ("stop", ""),
    ("stop", 5),
    ("stop_token_ids", [320]),
    ("stop_token_ids", [-1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [10**9]),
    ("logit_bias", {"320": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 1e9}),
    ("seed", 2**70),
    ("presence_penalty", 3),
    ("repetition_penalty", 0),
    ("priority", 1.5),
    ("truncate_prompt_tokens", 0),
    ("cache_salt", "x" * 2000),
    ("cache_salt", ""),
    ("suffix", "no"),
    ("best_of", 7),
    ("response_format", {"type": "xml"}),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"json": {"type": "nothing"}}),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: str(value)[:40])
def test_b64_b65_b76_a_bad_value_is_a_400_that_names_its_field(live: Live, field: str, value: Any) -> None:
    response = live.post("/v1/completions", **{"prompt": "x", "max_tokens": 4, **{field: value}})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"] or "").split(".")[0] == field, error
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "1e999"])
def test_b74_numbers_that_json_does_not_have(live: Live, literal: str) -> None:
    body = f'{{"prompt": "x", "temperature": {literal}}}'
    response = live.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-5, 1e-4, 2, 100])
def test_b74_any_temperature_is_defined_and_the_small_ones_are_greedy(live: Live, temperature: float) -> None:
    greedy = live.complete(PROMPT)["choices"][0]["text"]
    answer = live.complete(PROMPT, temperature=temperature, seed=3)["choices"][0]["text"]
    assert temperature >= 1e-4 or answer == greedy


def test_b76_nesting_and_size_are_refused_quickly(live: Live) -> None:
    deep = '{"prompt": ' + "[" * 10_000 + "]" * 10_000 + "}"
    response = live.http.post("/v1/completions", content=deep, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    big = b'{"prompt": "' + b"x" * (33 << 20) + b'"}'
    response = live.http.post("/v1/completions", content=big, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert live.http.get("/health").status_code == 200


def test_an_unknown_field_is_ignored_and_an_unknown_model_is_a_404(live: Live) -> None:
    assert live.complete("x", nobody_knows_this=1)
    response = live.post("/v1/completions", prompt="x", model="gpt-99")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_b85_stop_reasons(live: Live) -> None:
    text = live.complete(PROMPT, max_tokens=12, ignore_eos=True)["choices"][0]["text"]
    stop = text[2:5]
    (choice,) = live.complete(PROMPT, max_tokens=12, stop=[stop], ignore_eos=True)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == text[: text.index(stop)]


def test_beam_search_gives_its_beams_best_first(live: Live) -> None:
    answer = live.complete(PROMPT, use_beam_search=True, n=3, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_structured_outputs(live: Live) -> None:
    for wanted in (["left", "right"], ["12", "345"]):
        (choice,) = live.complete(PROMPT, max_tokens=30, structured_outputs={"choice": wanted})["choices"]
        assert choice["text"] in wanted
        assert choice["finish_reason"] == "stop"
    (choice,) = live.complete(PROMPT, max_tokens=30, structured_outputs={"regex": "[a-c]{7}"})["choices"]
    assert len(choice["text"]) == 7
    assert set(choice["text"]) <= set("abc")


def test_request_ids_are_echoed_and_never_trusted(live: Live) -> None:
    headers = {"X-Request-Id": "mine-1"}
    response = live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    odd = {"X-Request-Id": "a b"}
    assert "x-request-id" not in live.http.post("/v1/completions", json={"prompt": "x"}, headers=odd).headers


def test_truncate_prompt_tokens_keeps_the_end(live: Live) -> None:
    ids = live.post("/tokenize", prompt=PROMPT).json()["tokens"]
    answer = live.complete(PROMPT, truncate_prompt_tokens=5)
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["choices"][0]["text"] == live.complete(ids[-5:])["choices"][0]["text"]


def test_the_official_client_agrees(live: Live) -> None:
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    assert [card.id for card in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    parts = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    with pytest.raises(BadRequestError, match="top_p"):
        client.completions.create(model="tiny", prompt="x", top_p=7)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    *_, last = chat
    assert last.usage is not None
    assert last.usage.prompt_tokens_details is not None
    client.close()


def test_the_official_async_client_streams_tools(live: Live) -> None:
    import asyncio

    from openai import AsyncOpenAI

    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}}

    async def ask() -> str:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "What time is it?"}],
                tools=[tool],  # type: ignore[list-item]
                tool_choice="required",
                max_tokens=80,
                temperature=0,
                stream=True,
            )
            calls = [call async for chunk in stream for c in chunk.choices for call in c.delta.tool_calls or []]
            assert [call.function.name for call in calls if call.function and call.function.name] == ["now"]
            return "".join(call.function.arguments or "" for call in calls if call.function)

    assert json.loads(asyncio.run(ask())) == {}
