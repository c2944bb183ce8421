"""Passes over every logit of a batch, row by row: torch on a GPU, numpy on the CPU.

A torch operation on this many elements starts its team of threads, and beside other work the end of each such
region waits for the slowest thread; numpy does the same arithmetic in one thread, and its reductions and exp are
faster than torch's here (bench/sampler.py: an argmax over 64 x 49,152 takes 0.2 ms, torch's 2.6 ms on one thread).

Each function gives a row the same bits whatever else is in the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CHUNK = 256  # weights are padded to a multiple of it, so that they can be summed in chunks


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [R, V] -> the largest value and the first column that has it, per row. A NaN wins, so it shows."""
    if logits.device.type != "cpu":
        best = logits.max(dim=-1)
        return best.values, best.indices
    ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.gather(1, ids.unsqueeze(1)).squeeze(1), ids


def weigh(logits: Tensor, best: Tensor, inverse: Tensor) -> Tensor:
    """exp((logit - best) / temperature), the likeliest token has weight 1.

    logits float32 [D, V], best [D] (finite), inverse temperature [D] -> float32 [D, V rounded up to CHUNK], 0 past V
    """
    num_rows, num_ids = logits.shape
    weights = logits.new_empty((num_rows, -(-num_ids // CHUNK) * CHUNK))
    weights[:, num_ids:] = -torch.inf
    best, inverse = best.unsqueeze(1), inverse.unsqueeze(1)
    if logits.device.type != "cpu":
        torch.sub(logits, best, out=weights[:, :num_ids])
        return weights.mul_(inverse).exp_()
    out = weights.numpy()
    np.subtract(logits.numpy(), best.numpy(), out=out[:, :num_ids])
    np.multiply(out, inverse.numpy(), out=out)
    np.exp(out, out=out)
    return weights


def drop_below(weights: Tensor, logits: Tensor, least: Tensor) -> None:
    """Weight 0 for every logit below ``least`` [D]; in place."""
    kept = weights[:, : logits.shape[1]]
    if logits.device.type != "cpu":
        kept.mul_(logits >= least.unsqueeze(1))
        return
    np.multiply(kept.numpy(), logits.numpy() >= least.unsqueeze(1).numpy(), out=kept.numpy())


def normaliser(logits: Tensor) -> Tensor:
    """log(sum(exp(logit))) [R, 1] of rows whose maximum is finite."""
    if logits.device.type != "cpu":
        return logits.logsumexp(-1, keepdim=True)
    values = logits.numpy()
    best = values.max(axis=-1, keepdims=True)
    shifted = np.subtract(values, best)
    sums = np.exp(shifted, out=shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    return torch.from_numpy((best + np.log(sums)).astype(np.float32))


def num_above(logits: Tensor, value: Tensor) -> list[int]:
    """How many logits of each row are larger than ``value`` [R, 1]."""
    if logits.device.type != "cpu":
        return [int(count) for count in (logits > value).sum(-1).tolist()]
    return [int(count) for count in np.count_nonzero(logits.numpy() > value.numpy(), axis=-1)]
