"""A body on its way to its endpoint: what is refused, and with which words."""

from __future__ import annotations

import json
import socket

import pytest
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from live_server import Live

from pagedkv.server.route import read_body
from pagedkv.server.schema import CompletionRequest

JSON = "application/json"


def test_what_is_read_equals_what_validating_the_parsed_object_gives() -> None:
    fields = {"prompt": [1, 2, 3], "temperature": 1, "stop": ["a"], "logit_bias": {"5": 1.5}, "unknown": {"x": [1]}}
    read = read_body(CompletionRequest, json.dumps(fields).encode(), JSON)
    assert read == CompletionRequest.model_validate(fields)


@pytest.mark.parametrize("kind", [JSON, "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_kinds_that_say_json(kind: str) -> None:
    read = read_body(CompletionRequest, b'{"prompt": "x"}', kind)
    assert isinstance(read, CompletionRequest)
    assert read.prompt == "x"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-json-not", "text/json", "xapplication/json"])
def test_kinds_that_do_not(kind: str) -> None:
    with pytest.raises(HTTPException) as caught:
        read_body(CompletionRequest, b'{"prompt": "x"}', kind)
    assert caught.value.status_code == 400
    assert "Content-Type: application/json" in caught.value.detail


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b"", ("body",)),
        (b"{", ("body",)),
        (b"[]", ("body",)),
        (b'\xff{"prompt": "x"}', ("body",)),
        (b"{}", ("body", "prompt")),
        (b'{"prompt": "x", "n": "1"}', ("body", "n")),
        (b'{"prompt": "x", "temperature": NaN}', ("body", "temperature")),
    ],
)
def test_what_is_wrong_says_where(raw: bytes, where: tuple[str, ...]) -> None:
    with pytest.raises(RequestValidationError) as caught:
        read_body(CompletionRequest, raw, JSON)
    assert caught.value.errors()[0]["loc"] == where


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault_of_ours(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\nContent-Length: 100\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt":')
    assert live.complete("The next one is answered")["choices"]
    live.settle()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
