"""Reading traffic: both formats, what their ids mean, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedkv.errors import InvalidRequest
from pagedkv.insight.trace import Trace, TraceRequest, read_trace


def write_jsonl(path: Path, *entries: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def entry(at: int, length: int, ids: list[object], output: int = 5) -> dict[str, object]:
    return {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": ids}


def test_mooncake_lines_become_requests_with_arrivals_from_the_first(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", entry(3000, 1000, [7, 9]), entry(4500, 513, [7, 11], 0))
    trace = read_trace(path)
    assert (trace.name, trace.chunk_tokens) == ("t", 512)
    assert [(r.arrival, r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests] == [
        (0.0, 1000, 5),
        (1.5, 513, 0),
    ]
    first, second = (trace.prompt(request) for request in trace.requests)
    assert (len(first), len(second)) == (1000, 513)
    assert first[:512] == second[:512]
    assert first[512] != second[512]


def test_recorded_traffic_says_its_own_chunk_and_may_use_strings(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "r.jsonl", {"chunk_tokens": 16}, entry(0, 33, ["ab", "cd", "ef"]))
    trace = read_trace(path)
    assert trace.chunk_tokens == 16
    assert len(trace.prompt(trace.requests[0])) == 33


def test_azure_lines_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,600,8\n"
    )
    trace = read_trace(path)
    assert [r.arrival for r in trace.requests] == [0.0, 0.5]
    ids = [set(r.chunks) for r in trace.requests]
    assert ids[0].isdisjoint(ids[1])
    assert trace.num_prompt_tokens == 5408


def test_limit_reads_the_first_requests_only(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", *(entry(i, 10, [i]) for i in range(5)))
    assert len(read_trace(path, limit=2).requests) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"timestamp": 0}', "line 2: KeyError: 'input_length'"),
        ("{", "line 2: JSONDecodeError"),
        (json.dumps(entry(0, 0, [1])), "line 2: ValueError: input_length is 0; at least 1 is needed"),
        (json.dumps(entry(0, 10, [1], -1)), "output_length is -1"),
        (json.dumps(entry(0, 513, [1])), "line 2: 1 ids of 512 tokens for 513 prompt tokens"),
        ("[1, 2]", "line 2: TypeError"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(entry(0, 10, [1])) + "\n" + line + "\n")
    with pytest.raises(InvalidRequest) as raised:
        read_trace(path)
    assert complaint in str(raised.value)


def test_a_csv_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,x,10\n")
    with pytest.raises(InvalidRequest, match="line 2: ValueError"):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [("t.txt", "", "a trace is a .jsonl"), ("t.jsonl", "", "no requests"), ("missing.jsonl", None, "No such file")],
)
def test_a_file_that_is_no_trace(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=complaint):
        read_trace(tmp_path / name)


@pytest.mark.parametrize("block_size", [1, 3, 4, 7, 8, 16])
def test_block_identities_agree_with_the_tokens_they_stand_for(block_size: int) -> None:
    trace = Trace(
        "t",
        4,
        [
            TraceRequest(0.0, n, 0, ids)
            for n, ids in [(14, [0, 1, 2, 3]), (16, [0, 1, 4, 5]), (9, [0, 1, 2]), (8, [9, 8])]
        ],
    )
    meaning: dict[tuple[int, int], tuple[int, ...]] = {}
    for request in trace.requests:
        prompt = trace.prompt(request)
        for i, pair in enumerate(trace.blocks(request, block_size)):
            prefix = tuple(prompt[: (i + 1) * block_size])
            assert meaning.setdefault(pair, prefix) == prefix
    assert len(set(meaning.values())) == len(meaning)
