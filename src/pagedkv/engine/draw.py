"""The random part of sampling: weights, filters as thresholds, and the draw itself.

Randomness has no state. The number that decides a token is a hash of (seed, sample, position), a counter-based
generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): nothing to carry, to
copy at a fork or to restore after preemption, and no order in which rows must be served.

A filter is a threshold on the logit: what is below it is dropped. So tokens of equal logit stay or go together (as in
transformers' top_k), and the order in which a sort leaves equal values does not matter.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from pagedkv.engine.params import SamplingParams
from pagedkv.engine.rowwise import CHUNK

STRETCH = 32  # columns of which only the maximum is looked at first
WIDTHS = (64, 1024)  # largest values looked at before a whole row is sorted


def uniform(seed: int, index: int, position: int) -> float:
    """The random number in [0, 1) for output token ``position`` of sample ``index``; 53 bits."""
    key = struct.pack("<QII", seed & (2**64 - 1), index, position)
    return float(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def request_seed(params: SamplingParams, engine_seed: int, request_key: int) -> int:
    """The request's own seed, or one that only the engine's seed and its place in the order of arrival decide."""
    if params.seed is not None:
        return params.seed & (2**64 - 1)
    key = struct.pack("<QQ", engine_seed & (2**64 - 1), request_key)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"request").digest(), "little")


def draw(weights: Tensor, chances: Tensor) -> Tensor:
    """One id a row, with a probability proportional to its weight: the inverse of the cumulative distribution.

    weights float32 [D, n x CHUNK] with a positive weight in each row; chances float64 [D] in [0, 1) -> int64 [D]
    The sum is searched in two levels, so only one chunk of a row is ever accumulated.
    """
    chunks = weights.view(len(weights), -1, CHUNK)
    sums = chunks.sum(-1).double()
    reached = sums.cumsum(-1)
    target = (chances * reached[:, -1]).unsqueeze(1)
    chunk = torch.searchsorted(reached, target, right=True)  # exists: a chance has 53 bits, so target < reached[-1]
    inside = chunks.gather(1, chunk.unsqueeze(-1).expand(-1, 1, CHUNK)).squeeze(1).double().cumsum(-1)
    # A chunk's own sum differs from the accumulated one by rounding: look up the share, not the amount. It is below 1,
    # since the target is at least half a unit in the last place below what the chunk reaches.
    share = ((target - reached.gather(1, chunk)) / sums.gather(1, chunk) + 1).clamp_(min=0)
    offset = torch.searchsorted(inside, share * inside[:, -1:], right=True)
    return (chunk * CHUNK + offset).squeeze(1)


def keep_thresholds(
    logits: Tensor, best: Tensor, inverse: Tensor, totals: Tensor, params: Sequence[SamplingParams]
) -> Tensor:
    """The least logit that min_p, top_k and top_p keep, per row; -inf where none of them is set.

    logits float32 [D, V], best [D], inverse temperature [D], totals float64 [D] (sum of the row's weights) -> [D]
    top_p keeps the smallest set of likeliest tokens whose mass reaches top_p of what min_p and top_k left.
    """
    device, num_ids = logits.device, logits.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < num_ids else num_ids for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    floor = torch.tensor([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], device=device)
    floor = best + floor / inverse
    least = floor.clone()
    open_rows = ((top_k < num_ids) | (top_p < 1)).nonzero().squeeze(1)
    for width in (*WIDTHS, num_ids):
        if not len(open_rows):
            break
        at = open_rows
        some = logits if len(at) == len(logits) else logits[at]
        found, done = _prefix_threshold(
            _largest(some, min(width, num_ids)),
            (best[at], inverse[at], totals[at], floor[at]),
            (top_k[at], top_p[at]),
            num_ids,
        )
        least[at[done]] = torch.maximum(found, floor[at])[done]
        open_rows = at[~done]
    return least


def _largest(logits: Tensor, number: int) -> Tensor:
    """The ``number`` largest values of every row, descending.

    They lie in the ``number`` stretches with the largest maxima, so where these are few only they are looked through.
    """
    whole = logits.shape[1] // STRETCH * STRETCH
    if number > whole // STRETCH // 4:
        return logits.topk(number).values
    stretches = logits[:, :whole].view(len(logits), -1, STRETCH)
    where = stretches.amax(-1).topk(number).indices.unsqueeze(-1).expand(-1, -1, STRETCH)
    return torch.cat([stretches.gather(1, where).flatten(1), logits[:, whole:]], dim=1).topk(number).values


def _prefix_threshold(
    values: Tensor, row: tuple[Tensor, Tensor, Tensor, Tensor], limits: tuple[Tensor, Tensor], num_ids: int
) -> tuple[Tensor, Tensor]:
    """The threshold as far as the ``width`` largest values of a row can tell.

    values [F, width], descending -> (threshold [F], bool [F]: the answer lies within these values)
    """
    best, inverse, totals, floor = row
    top_k, top_p = limits
    width = values.shape[1]
    kept = (values >= floor.unsqueeze(1)) & (torch.arange(width, device=values.device) < top_k.unsqueeze(1))
    weights = (((values - best.unsqueeze(1)) * inverse.unsqueeze(1)).exp() * kept).double()
    mass = weights.cumsum(-1)
    unlimited = (top_k == num_ids) & torch.isinf(floor)
    whole = (kept.sum(-1) < width) | (top_k <= width) | (width == num_ids)  # all that is kept is in sight
    goal = top_p * torch.where(whole, mass[:, -1], totals)
    count = (kept & (mass - weights < goal.unsqueeze(1))).sum(-1).clamp_(min=1)
    done = whole | (unlimited & (count < width))
    return values.gather(1, (count - 1).unsqueeze(1)).squeeze(1), done
