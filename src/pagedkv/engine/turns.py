"""Chat turns keep the ids that the model generated, so that a chat's next prompt begins with the same tokens.

A reply is text by the time a client sends it back, and its text may tokenise differently from how the model wrote it:
then the prefix cache finds everything up to the reply and nothing after it. So a finished chat is remembered as
(text so far -> ids so far), and a new prompt that begins with such a text takes those ids and tokenises only the rest.

    turn 1   prompt text P1, ids p1   ->  reply, ids r1              remembered: text of p1 + r1  ->  p1 + r1
    turn 2   prompt text P2 = P1 + reply + ...                       ids: p1 + r1 + encode(rest)

Only prompts that were made here (``encode``) are remembered, only while decoding their ids gives back the very text
(so a reply that a stop string cut short, or that hides special tokens, is not), and only within ``max_tokens`` ids in
all, least recently used first out. A text under one salt is not found under another. Thread-safe: prompts are made in
the callers' threads and replies finish in the engine's.

Cost: one SHA-256 pass over a prompt's text, plus one look-up for each distinct length remembered.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

MAX_CHATS = 512
MAX_TOKENS = 2_000_000  # 8 MB of ids


class Codec(Protocol):
    """What this needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class _Chat(NamedTuple):
    length: int  # of its text, in bytes of UTF-8
    ids: array[int]


class ChatTurns:
    """The finished chats that a new prompt may continue."""

    def __init__(self, tokenizer: Codec, *, max_chats: int = MAX_CHATS, max_tokens: int = MAX_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._max_chats = max_chats
        self._max_tokens = max_tokens
        self._chats: OrderedDict[bytes, _Chat] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._asked: OrderedDict[bytes, None] = OrderedDict()  # digests of the prompts made here, with their salts
        self._num_tokens = 0
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Ids kept now."""
        return self._num_tokens

    def encode(self, text: str, *, salt: str = "") -> list[int]:
        """The ids of a rendered chat. Where it begins with a text that was generated here, these are its own ids."""
        data = text.encode("utf-8", "surrogatepass")
        with self._lock:
            known = self._longest(data, salt)
        if known is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            rest = data[known.length :].decode("utf-8", "surrogatepass")
            ids = [*known.ids, *self._tokenizer.encode(rest, add_special_tokens=False)]
        with self._lock:
            self._asked[_digest_of_ids(salt, ids)] = None
            if len(self._asked) > 4 * self._max_chats:
                self._asked.popitem(last=False)
        return ids

    def finished(self, prompt_ids: Sequence[int], output_ids: Sequence[int], text: str, *, salt: str = "") -> None:
        """A sequence ended. ``output_ids`` are without the EOS that ended it; ``text`` is what the client was given."""
        with self._lock:
            asked = _digest_of_ids(salt, prompt_ids) in self._asked
        if not asked or not output_ids:
            return
        decode = self._tokenizer.decode
        if decode(output_ids, skip_special_tokens=False) != text:
            return
        ids = [*prompt_ids, *output_ids]
        whole = decode(ids, skip_special_tokens=False)
        if not whole.endswith(text):
            return
        data = whole.encode("utf-8", "surrogatepass")
        with self._lock:
            self._keep(_hash(salt, data).digest(), _Chat(len(data), array("I", ids)))

    def _longest(self, data: bytes, salt: str) -> _Chat | None:
        state, start, found = _hash(salt, b""), 0, None
        for length in sorted(self._lengths):
            if length > len(data):
                break
            state.update(data[start:length])
            start = length
            digest = state.digest()
            if digest in self._chats:
                self._chats.move_to_end(digest)
                found = self._chats[digest]
        return found

    def _keep(self, digest: bytes, chat: _Chat) -> None:
        self._forget(digest)
        self._chats[digest] = chat
        self._lengths[chat.length] += 1
        self._num_tokens += len(chat.ids)
        while len(self._chats) > self._max_chats or self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._chats)))

    def _forget(self, digest: bytes) -> None:
        chat = self._chats.pop(digest, None)
        if chat is None:
            return
        self._num_tokens -= len(chat.ids)
        self._lengths[chat.length] -= 1
        if not self._lengths[chat.length]:
            del self._lengths[chat.length]


def _hash(salt: str, data: bytes) -> hashlib._Hash:
    named = salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(len(named).to_bytes(4, "little") + named + data)


def _digest_of_ids(salt: str, ids: Sequence[int]) -> bytes:
    return _hash(salt, array("I", ids).tobytes()).digest()
