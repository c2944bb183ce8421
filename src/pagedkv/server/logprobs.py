"""Log-probabilities in OpenAI's two shapes, finite always, since JSON has no infinity.

They are the model's own, before temperature and filters. A token that a filter or a bias rules out keeps what the
model gave it; what the model gives nothing at all is shown as ``FLOOR``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagedkv.engine.detokenize import IncrementalDetokenizer
from pagedkv.engine.outputs import Logprob, TokenLogprobs
from pagedkv.model.tokenizer import Tokenizer
from pagedkv.server.schema import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

FLOOR = -9999.0


def finite(value: float) -> float:
    return value if value > FLOOR else FLOOR


def best(entry: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` most likely tokens of an entry, best first (the entry itself begins with the chosen one)."""
    return sorted(entry.items(), key=lambda item: -item[1].logprob)[:count]


class TextOffsets:
    """Where each token begins in the text, counted in characters, over tokens that may hold parts of one."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._text = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self.position = start

    def next(self, token_id: int) -> int:
        begin = self.position
        self.position += len(self._text.push(token_id))
        return begin


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Iterable[TokenLogprobs | None],
    count: int,
    offsets: TextOffsets,
    tokenizer: Tokenizer,
) -> CompletionLogprobs:
    """``entries``: one a token; None for a prompt's first token, which nothing comes before."""
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, entry in zip(token_ids, entries, strict=True):
        result.text_offset.append(offsets.next(token_id))
        result.tokens.append(tokenizer.token_text(token_id))
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(finite(entry[token_id].logprob))
        shown = {**dict(best(entry, count)), token_id: entry[token_id]}
        top: dict[str, float] = {}
        for other, logprob in shown.items():  # two ids may read alike (parts of characters): the likelier one stays
            text = tokenizer.token_text(other)
            top[text] = max(finite(logprob.logprob), top.get(text, FLOOR))
        result.top_logprobs.append(top)
    return result


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs], count: int, tokenizer: Tokenizer
) -> ChatLogprobs:
    def one(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob.logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return ChatLogprobs(
        content=[
            TokenLogprob(
                **one(token_id, entry[token_id]),
                top_logprobs=[TopLogprob(**one(other, logprob)) for other, logprob in best(entry, count)],
            )
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]
    )


def prompt_logprobs(entries: Sequence[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: a dictionary of id -> {logprob, rank, decoded_token} for each prompt token, null for the first."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(lp.logprob), "rank": lp.rank, "decoded_token": lp.decoded_token}
            for token_id, lp in entry.items()
        }
        for entry in entries
    ]
