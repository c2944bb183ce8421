"""Log-probabilities as they are reported: of the model itself, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pagedkv.engine.outputs import Logprob, TokenLogprobs
from pagedkv.engine.rowwise import normaliser, num_above

PIECE = 128  # rows of a prompt handled at once, which bounds the memory of a long one


def most_likely(
    logits: Tensor,
    chosen: Sequence[int],
    numbers: Sequence[int],
    token_text: Callable[[int], str] | None = None,
) -> list[TokenLogprobs]:
    """The chosen token of every row and beside it its ``numbers[i]`` likeliest ones.

    logits float32 [R, V]. The chosen token comes first; a token that is both is listed once. Rank: one more than the
    number of tokens with a larger logit.
    """
    ids = torch.tensor(chosen, device=logits.device)
    total = normaliser(logits)
    own = logits.gather(1, ids.unsqueeze(1))
    ranks = [count + 1 for count in num_above(logits, own)]
    own_values = (own - total).squeeze(1).tolist()
    top = logits.topk(min(max(numbers, default=0), logits.shape[1]))
    columns = zip(top.values.tolist(), (top.values - total).tolist(), top.indices.tolist(), strict=True)
    text = token_text or _no_text
    result: list[TokenLogprobs] = []
    for i, (raw, values, found) in enumerate(columns):
        entry = {chosen[i]: Logprob(own_values[i], ranks[i], text(chosen[i]))}
        best_first = sorted(zip(raw, values, found, strict=True), key=lambda column: (-column[0], column[2]))
        rank = 1
        for place in range(min(numbers[i], len(best_first))):
            rank = rank if best_first[place][0] == best_first[rank - 1][0] else place + 1
            _, value, token = best_first[place]
            entry.setdefault(token, Logprob(value, rank, text(token)))
        result.append(entry)
    return result


def prompt_logprobs(
    logits: Tensor,
    next_ids: Sequence[int],
    number: int,
    token_text: Callable[[int], str] | None = None,
) -> list[TokenLogprobs]:
    """Row i of logits [T, V] is the distribution of ``next_ids[i]``; of a whole prompt or of one chunk of it."""
    result: list[TokenLogprobs] = []
    for start in range(0, len(next_ids), PIECE):
        ids = next_ids[start : start + PIECE]
        result += most_likely(logits[start : start + len(ids)], ids, [number] * len(ids), token_text)
    return result


def _no_text(_: int) -> None:
    return None
