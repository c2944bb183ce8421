"""Logits to tokens, for a whole batch at once.

Owns what ``SamplingParams`` says about choosing a token. A step of greedy rows without extras is one argmax; other
rows pass through, in this order (vLLM's): allowed ids, bad words, minimum length, bias, penalties, temperature,
min_p, top_k, top_p, draw.

Guarantees:
- A row's token depends on the row alone: its logits, its parameters, its tokens, its seed. Every operation works row
  by row, and the randomness has no state (``draw.uniform``), so neither the batch nor a preemption changes a token.
- Never an id at or past ``num_decodable``; never an id of weight zero.
- A row that holds NaN or +inf, or in which nothing is left to choose, is an error of that row alone.
- ``logits`` are read only. Log-probabilities are those of the model itself, before any of the above (as vLLM's
  ``raw_logprobs``).

Costs: O(R x V) element-wise passes; filters sort the 64 largest values of a row first, 1,024 and then all only for
rows that need more (a flat distribution under top_p). Penalties touch the distinct tokens of a row, not V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagedkv.engine.adjust import SampleRow, adjust, encode_bad_words
from pagedkv.engine.draw import draw, keep_thresholds, request_seed, uniform
from pagedkv.engine.logprobs import most_likely
from pagedkv.engine.outputs import TokenLogprobs
from pagedkv.engine.rowwise import CHUNK, drop_below, largest, weigh

__all__ = ["SampleResult", "SampleRow", "Sampler", "encode_bad_words", "request_seed"]


class SampleResult(NamedTuple):
    """One entry a row: the token (-1 where it failed), its log-probabilities if asked for, what went wrong if so."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


class Sampler:
    """vocab_size:    columns of the logits
    num_decodable: ids that the tokenizer knows (None: all); columns from there on are not part of the distribution
    token_text:    id -> text, for ``Logprob.decoded_token``
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        num_decodable: int | None = None,
        token_text: Callable[[int], str] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_ids = vocab_size if num_decodable is None else min(vocab_size, num_decodable)
        self.token_text = token_text

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> SampleResult:
        """The next token of every row.

        logits: float32 [R, vocab_size], row i for ``rows[i]``; a row may be given to several (n samples of a prompt)
        """
        if logits.shape != (len(rows), self.vocab_size) or logits.dtype != torch.float32:
            raise ValueError(
                f"logits must be float32 [{len(rows)}, {self.vocab_size}], got {logits.dtype} {list(logits.shape)}"
            )
        raw = logits[:, : self.num_ids]
        final = adjust(raw, rows)
        best, token_ids = largest(final)
        errors = [_fault(value) for value in best.tolist()]
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy and errors[i] is None]
        if drawn:
            at = torch.tensor(drawn, device=logits.device)
            some = final if len(drawn) == len(rows) else final[at]
            chosen = _draw(some, best[at], [rows[i] for i in drawn])
            token_ids = token_ids.index_copy(0, at, chosen)
        ids = [-1 if error else token for token, error in zip(token_ids.tolist(), errors, strict=True)]
        return SampleResult(ids, self._logprobs(raw, rows, ids), errors)

    def _logprobs(self, raw: Tensor, rows: Sequence[SampleRow], ids: list[int]) -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(rows)
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None and ids[i] >= 0]
        if wanted:
            numbers = [rows[i].params.logprobs or 0 for i in wanted]
            entries = most_likely(raw[wanted], [ids[i] for i in wanted], numbers, self.token_text)
            for i, entry in zip(wanted, entries, strict=True):
                result[i] = entry
        return result


def _fault(best: float) -> str | None:
    if best == float("-inf"):
        return "no token is left to choose: every id is excluded by the request's own parameters or by the model"
    if best != best or best == float("inf"):
        return f"the model's logits hold {best}"
    return None


def _draw(logits: Tensor, best: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """logits [D, V] and their row maxima [D], all of rows that are drawn at random -> ids int64 [D]."""
    device = logits.device
    inverse = torch.tensor([1.0 / row.params.temperature for row in rows], dtype=torch.float32, device=device)
    chances = torch.tensor([uniform(row.seed, row.index, row.num_outputs) for row in rows], dtype=torch.float64)
    weights = weigh(logits, best, inverse)
    if any(row.filters for row in rows):
        totals = weights.view(len(rows), -1, CHUNK).sum(-1).sum(-1, dtype=torch.float64)
        least = keep_thresholds(logits, best, inverse, totals, [row.params for row in rows])
        drop_below(weights, logits, least)
    return draw(weights, chances.to(device))
