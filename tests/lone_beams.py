"""Beam search without an engine: the policy over whole histories, each computed from scratch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pagedkv.engine.beam import BeamSearch, Hypothesis, top_candidates
from pagedkv.engine.params import BeamSearchParams

Model = Callable[[Sequence[int]], Tensor]  # new tokens so far -> logits float32 [V]


def search(model: Model, params: BeamSearchParams, eos: Sequence[int] = ()) -> list[Hypothesis]:
    """Drives the policy as the engine does, with lists of tokens in place of block tables."""
    beam = BeamSearch(params, eos, params.max_tokens)
    running: list[list[int]] = [[]]
    while running:
        logits = torch.stack([model(tokens) for tokens in running])
        moves = beam.step(top_candidates(logits, beam.width_of_candidates, params.temperature))
        assert len(moves) <= params.beam_width
        running = [[*running[move.parent], move.token_id] for move in moves]
        assert len({tuple(tokens) for tokens in running}) == len(running)  # no beam twice
    return beam.hypotheses()
