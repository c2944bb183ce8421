"""Recording traffic for ``replay``: lengths, and hashes that say which beginnings are equal. No text, no ids.

Hashes are keyed with a random secret that is not written anywhere, so nobody can test a guess of a prompt against a
recording, and two recordings cannot be joined.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from pagedkv.errors import InvalidRequest

CHUNK_TOKENS = 16


class TraceRecorder:
    """Appends a line per request to a new file; each line is on disk when ``add`` returns."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("x", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"record: {path}: {error.strerror}; name a new file", field="record") from error
        self._secret = secrets.token_bytes(32)
        self._write({"chunk_tokens": CHUNK_TOKENS})

    def add(self, arrival: float, prompt: Sequence[int], num_output_tokens: int, scope: str = "") -> None:
        """One request: arrival in seconds of any clock that is the same for all; equal text in two scopes differs."""
        parent, ids = blake2b(scope.encode(), key=self._secret, digest_size=8).digest(), []
        for start in range(0, len(prompt), CHUNK_TOKENS):
            chunk = array("I", prompt[start : start + CHUNK_TOKENS]).tobytes()
            parent = blake2b(parent + chunk, key=self._secret, digest_size=8).digest()
            ids.append(parent.hex())
        lengths = {"input_length": len(prompt), "output_length": num_output_tokens}
        self._write({"timestamp": round(1000 * arrival), **lengths, "hash_ids": ids})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
