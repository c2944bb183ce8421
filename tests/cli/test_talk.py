"""chat, complete and run-batch, against a model in the process and against a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import serving
from typer.testing import CliRunner

from pagedkv.cli.main import app
from pagedkv.cli.options import parse_bytes
from pagedkv.cli.talk import LocalModel
from pagedkv.errors import InvalidRequest

RUN = CliRunner()
SMALL = ["--num-gpu-blocks-override", "64", "--block-size", "4", "--dtype", "float32"]


def run(*words: str, text: str | None = None) -> Any:
    result = RUN.invoke(app, list(words), input=text)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model())


def test_complete_goes_on_with_a_prompt(model: str) -> None:
    words = ("complete", "The cache", "--model", model, "--max-tokens", "6", *SMALL)
    first, again = run(*words), run(*words)
    assert first.stdout == again.stdout
    assert len(first.stdout) > 1
    piped = RUN.invoke(app, ["complete", "-", *words[2:]], input="The cache")
    assert piped.stdout == first.stdout


def test_a_second_turn_hits_the_first(model: str) -> None:
    talk = run(
        *("chat", model, "--max-tokens", "8", "--temperature", "0", *SMALL),
        text="Tell me of blocks.\nAnd of tables?\n/reset\n/help\n",
    )
    notes = [line for line in talk.stderr.splitlines() if "prompt tokens" in line]
    assert len(notes) == 2
    assert ", 0 cached" in notes[0]
    cached = int(notes[1].split(" prompt tokens, ")[1].split()[0])
    prompt = int(notes[0].split()[0].lstrip("["))
    assert cached >= prompt - 4
    assert "forgotten" in talk.stderr


def test_ctrl_c_stops_the_answer_and_not_the_program(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LocalModel.chat
    interrupted: list[bool] = []

    def pressed(self: LocalModel, messages: Any, **params: Any) -> Iterator[str]:
        pieces = whole(self, messages, **params)
        yield next(pieces)
        if not interrupted:
            interrupted.append(True)
            pieces.close()
            assert not self._llm.engine.has_unfinished()
            raise KeyboardInterrupt
        yield from pieces

    monkeypatch.setattr(LocalModel, "chat", pressed)
    talk = run(*("chat", model, "--max-tokens", "8", *SMALL), text="First.\nSecond.\n")
    assert talk.stderr.count("prompt tokens") == 2
    assert "stopped" in talk.stderr


def test_a_server_is_talked_to_in_the_same_way(model: str) -> None:
    with serving(model) as live:
        here = run("complete", "The cache", "--model", model, "--max-tokens", "6", *SMALL)
        there = run("complete", "The cache", "--url", live.url, "--max-tokens", "6")
        assert there.stdout == here.stdout
        talk = run("chat", "--url", live.url + "/v1", "--max-tokens", "4", text="Hello.\n")
        assert "prompt tokens" in talk.stderr
        bad = RUN.invoke(app, ["complete", "x", "--url", live.url, "--temperature", "-1"])
        assert isinstance(bad.exception, InvalidRequest)
        assert "temperature" in str(bad.exception)
        bad = RUN.invoke(app, ["complete", "x", "--url", live.url, "--block-size", "4"])
        assert "--block-size" in str(bad.exception)


def test_nobody_there_is_one_line() -> None:
    bad = RUN.invoke(app, ["complete", "x", "--url", "http://127.0.0.1:9"])
    assert isinstance(bad.exception, InvalidRequest)


def test_a_batch_is_answered_in_order_and_bad_lines_stop_nothing(model: str, tmp_path: Path) -> None:
    def line(custom_id: str, url: str, **body: Any) -> str:
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})

    chat = [{"role": "user", "content": "Hello"}]
    asked = tmp_path / "in.jsonl"
    asked.write_text(
        "\n".join(
            [
                *(line(f"c{i}", "/v1/completions", prompt=f"Number {i}", max_tokens=2 + i) for i in range(4)),
                line("chat", "/v1/chat/completions", messages=chat, max_tokens=3),
                line("bad", "/v1/completions", prompt="x", top_p=9),
                "nonsense",
                line("stream", "/v1/completions", prompt="x", stream=True),
                line("elsewhere", "/v1/embeddings", input="x"),
            ]
        )
    )
    target = tmp_path / "out.jsonl"
    done = run("run-batch", model, "-i", str(asked), "-o", str(target), "--max-in-flight", "3", *SMALL)
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    assert [a["custom_id"] for a in answers] == [*("c0", "c1", "c2", "c3", "chat", "bad"), None, "stream", "elsewhere"]
    statuses = [a["response"] and a["response"]["status_code"] for a in answers]
    assert statuses == [200] * 5 + [400] + [None] * 3
    assert all(a["error"]["message"] for a in answers[6:])
    assert "9 requests answered, 4 of them with an error" in done.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5g", 1_500_000_000), ("77", 77), ("4 kb", 4000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_flags_that_do_nothing_or_are_refused_say_so(model: str) -> None:
    noted = run("complete", "x", "--model", model, "--max-tokens", "1", "--swap-space", "4", *SMALL)
    assert "--swap-space does nothing" in noted.stderr
    refused = RUN.invoke(app, ["complete", "x", "--model", model, "--trust-remote-code"])
    assert "no code that comes with a model" in str(refused.exception)
    near = RUN.invoke(app, ["complete", "x", "--max-token", "4"])
    assert "--max-tokens" in near.output


def test_collect_env_names_what_a_report_needs() -> None:
    text = run("collect-env").stdout
    assert all(word in text for word in ("pagedkv:", "torch:", "compiled parts:", "attention on cpu:", "memory:"))
