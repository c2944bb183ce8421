"""Token ids to text, one token at a time, each byte looked at once.

A token is bytes, and a character may lie across tokens. What has come so far is decoded as far as whole characters go;
the rest waits for the next token. So the joined pieces are ``tokenizer.decode(all ids)``, with two rules:

- A character that is still incomplete when the text ends is left out (``decode`` would show U+FFFD for it). Bytes that
  can never become a character are one U+FFFD for each maximal piece of a character, as ``decode`` does for byte-level
  tokenizers (a SentencePiece decoder writes one for each byte of the run, which it knows only when the run is over).
- The text continues a prompt, so a blank that the first token begins with stays (SentencePiece decoders strip it).
"""

from __future__ import annotations

import codecs
from typing import Protocol

_Utf8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What is needed of a tokenizer (``model.tokenizer.Tokenizer`` has it)."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """One stream of tokens. O(bytes of the token) a push; keeps at most three bytes."""

    def __init__(self, tokenizer: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = _Utf8("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; an id without a token completes none."""
        if token_id in self._skipped:
            return ""
        text = self._utf8.decode(self._token_bytes(token_id))
        waiting = self.pending
        if waiting[:1] == b"\xed" and waiting[1:] >= b"\xa0":  # a surrogate: CPython waits for its third byte in vain
            self._utf8.reset()
            text += "\ufffd" * len(waiting)
        return text

    @property
    def pending(self) -> bytes:
        """The beginning of a character that is not complete yet."""
        return self._utf8.getstate()[0]
