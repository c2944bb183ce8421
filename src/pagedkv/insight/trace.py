"""Recorded traffic: who came when, how long, and which beginnings were alike. No text.

A trace says of every request its arrival, its lengths, and one id per run of ``chunk_tokens`` prompt tokens. Equal ids
mean equal tokens after an equal beginning, so an id stands for the whole prompt up to the end of its run.

    *.jsonl   Mooncake's format: {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}, 512 tokens each.
              A first line {"chunk_tokens": n} says another number; ``serve --record`` writes that. Ids may be strings.
    *.csv     Azure's format: TIMESTAMP, ContextTokens, GeneratedTokens. Lengths only, so no two prompts share anything.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pagedkv.errors import InvalidRequest

MOONCAKE_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    arrival:        seconds after the first request of the trace
    num_prompt_tokens, num_output_tokens: its lengths, at least 1 and 0
    chunks:         ids of its prompt, one per ``chunk_tokens`` tokens begun
    """

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    chunks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    chunk_tokens: int
    requests: list[TraceRequest] = field(repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests together."""
        return sum(request.num_prompt_tokens for request in self.requests)

    def prompt(self, request: TraceRequest) -> array[int]:
        """Token ids with the trace's pattern of sharing: every token of a run is the run's id.

        Two prompts are equal up to the first run whose ids differ, and differ from its first token on.
        """
        tokens = array("I")
        for chunk in request.chunks:
            tokens.extend(array("I", (chunk,)) * self.chunk_tokens)
        del tokens[request.num_prompt_tokens :]
        return tokens

    def blocks(self, request: TraceRequest, block_size: int) -> list[tuple[int, int]]:
        """What each full block of the prompt is: (id of the run in which it ends, its index).

        Equal pairs are equal blocks after equal beginnings, whatever the block size.
        """
        chunks, per_chunk = request.chunks, self.chunk_tokens
        return [
            (chunks[((index + 1) * block_size - 1) // per_chunk], index)
            for index in range(request.num_prompt_tokens // block_size)
        ]


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The trace in ``path``, the first ``limit`` requests of it. InvalidRequest names the line that cannot be read."""
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv}
    if path.suffix not in readers:
        raise InvalidRequest(
            f"{path.name}: a trace is a .jsonl (Mooncake, recorded) or .csv (Azure) file", field="trace"
        )
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            trace = readers[path.suffix](path.stem, lines, limit)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field="trace") from error
    if not trace.requests:
        raise InvalidRequest(f"{path.name}: no requests in it", field="trace")
    return trace


class _Lines:
    """Lines with their numbers, so that an error can name one."""

    def __init__(self, name: str, lines: Iterator[str]) -> None:
        self.name, self.number, self._lines = name, 0, lines

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.number += 1
            yield line

    def bad(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"{self.name}, line {self.number}: {why}", field="trace")


def _read_jsonl(name: str, lines: Iterator[str], limit: int | None) -> Trace:
    numbered = _Lines(name, lines)
    requests: list[TraceRequest] = []
    ids: dict[Any, int] = {}
    chunk_tokens = MOONCAKE_CHUNK_TOKENS
    for line in numbered:
        if limit is not None and len(requests) >= limit:
            break
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "chunk_tokens" in entry and not requests:
                chunk_tokens = _at_least(1, entry["chunk_tokens"], "chunk_tokens")
                continue
            arrival = float(entry["timestamp"]) / 1000
            length = _at_least(1, entry["input_length"], "input_length")
            output = _at_least(0, entry["output_length"], "output_length")
            chunks = array("I", [ids.setdefault(value, len(ids)) for value in entry["hash_ids"]])
        except (KeyError, TypeError, ValueError) as error:
            raise numbered.bad(f"{type(error).__name__}: {error}") from error
        if len(chunks) * chunk_tokens < length:
            raise numbered.bad(f"{len(chunks)} ids of {chunk_tokens} tokens for {length} prompt tokens")
        requests.append(TraceRequest(arrival, length, output, chunks))
    requests.sort(key=lambda request: request.arrival)  # a recording is in order of ending
    first = requests[0].arrival if requests else 0.0
    return Trace(name, chunk_tokens, [replace(request, arrival=request.arrival - first) for request in requests])


def _read_csv(name: str, lines: Iterator[str], limit: int | None) -> Trace:
    numbered = _Lines(name, lines)
    requests: list[TraceRequest] = []
    first: datetime | None = None
    fresh = 0
    for row in csv.DictReader(numbered):
        if limit is not None and len(requests) >= limit:
            break
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven digits of a second; Python reads six
            length = _at_least(1, row["ContextTokens"], "ContextTokens")
            output = _at_least(0, row["GeneratedTokens"], "GeneratedTokens")
        except (KeyError, TypeError, ValueError) as error:
            raise numbered.bad(f"{type(error).__name__}: {error}") from error
        first = first or at
        num_chunks = -(-length // MOONCAKE_CHUNK_TOKENS)
        chunks = range(fresh, fresh + num_chunks)
        fresh += num_chunks
        requests.append(TraceRequest((at - first).total_seconds(), length, output, chunks))
    return Trace(name, MOONCAKE_CHUNK_TOKENS, requests)


def _at_least(least: int, value: Any, name: str) -> int:
    number = int(value)
    if number < least:
        raise ValueError(f"{name} is {number}; at least {least} is needed")
    return number
