"""Beam search as a policy: candidates in, moves out. It knows no engine, no block and no model.

The engine runs one sequence a beam. After a step it hands each beam's likeliest next tokens to ``step`` and carries out
the moves: a beam that goes on in several moves is forked (its blocks are shared, the last one is copied when written),
one that goes on in none is freed.

Scores, endings and the order of beams are those of ``transformers.generate(num_beams=W, early_stopping=False)``:
- of all continuations the (1 + number of EOS ids) x W best count (at least 2 W), so that W go on if all W best end;
- a continuation that ends counts as finished only if it is among the W best of its step; its score is its
  log-probability / length ** length_penalty, and the W best finished ones are kept;
- the search is over when W have finished and the best running beam, were it to end at its present length, could not
  replace the worst of them; or at the greatest length.
Where fewer than W different continuations exist (W above the vocabulary, first step), fewer beams run.

Costs: O(W x candidates) a step. Beams share their history as a chain of tokens, so a step copies none of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pagedkv.engine.outputs import FinishReason
from pagedkv.engine.params import GREEDY_TEMPERATURE, BeamSearchParams

Candidate = tuple[int, float]  # a token and its log-probability


class BeamMove(NamedTuple):
    """Running beam ``parent`` goes on with ``token_id``; the moves of a step are in order of score."""

    parent: int
    token_id: int


class Hypothesis(NamedTuple):
    """One finished beam. ``tokens`` are the new ones, the EOS id that ended it included."""

    tokens: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


class _Link(NamedTuple):
    """A token and what came before it."""

    token_id: int
    before: _Link | None


class _Beam(NamedTuple):
    logprob: float
    last: _Link | None


class _Continuation(NamedTuple):
    logprob: float
    parent: int
    token_id: int

    @property
    def order(self) -> tuple[float, int, int]:
        return (-self.logprob, self.parent, self.token_id)


class BeamSearch:
    """One search. It starts with one beam, the prompt; ``step`` until it returns no move.

    eos_ids:        ids that end a beam (none of them does with ``ignore_eos``)
    max_new_tokens: the greatest length; ``params.max_tokens``, or less where the context ends before
    """

    def __init__(self, params: BeamSearchParams, eos_ids: Sequence[int], max_new_tokens: int) -> None:
        self.width = params.beam_width
        self._penalty = params.length_penalty
        self._eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        self._max_new_tokens = max_new_tokens
        self._length = 0
        self._running = [_Beam(0.0, None)]
        self._finished: list[Hypothesis] = []

    @property
    def width_of_candidates(self) -> int:
        """Continuations that count in a step; no beam can contribute more."""
        return max(2, 1 + len(self._eos_ids)) * self.width

    def step(self, candidates: Sequence[Sequence[Candidate]]) -> list[BeamMove]:
        """One token further. ``candidates[i]``: the likeliest next tokens of running beam i, in any order.

        Returns what runs next (none: the search is over). Beam i of the next step is the i-th move.
        """
        if len(candidates) != len(self._running):
            raise ValueError(f"{len(self._running)} beams run, but there are candidates of {len(candidates)}")
        best = heapq.nsmallest(
            self.width_of_candidates,
            (
                _Continuation(beam.logprob + logprob, parent, token)
                for parent, (beam, own) in enumerate(zip(self._running, candidates, strict=True))
                for token, logprob in own
                if logprob > -math.inf
            ),
            key=lambda continuation: continuation.order,
        )
        self._length += 1
        at_end = self._length == self._max_new_tokens
        for continuation in best[: self.width]:
            if at_end or continuation.token_id in self._eos_ids:
                self._finish(continuation)
        alive = [] if at_end else [c for c in best if c.token_id not in self._eos_ids][: self.width]
        if alive and self._cannot_improve(alive[0]):
            alive = []
        self._running = [_Beam(c.logprob, _Link(c.token_id, self._running[c.parent].last)) for c in alive]
        return [BeamMove(c.parent, c.token_id) for c in alive]

    def close(self) -> None:
        """The engine ends the search here: running beams count as finished at their present length."""
        for beam in self._running:
            if beam.last is not None:
                self._keep(beam, "length")
        self._running = []

    def hypotheses(self) -> list[Hypothesis]:
        """Finished beams, the best first; at most W."""
        return list(self._finished)

    def _finish(self, continuation: _Continuation) -> None:
        last = _Link(continuation.token_id, self._running[continuation.parent].last)
        reason: FinishReason = "stop" if continuation.token_id in self._eos_ids else "length"
        self._keep(_Beam(continuation.logprob, last), reason)

    def _keep(self, beam: _Beam, reason: FinishReason) -> None:
        hypothesis = Hypothesis(_tokens(beam.last), beam.logprob, self._score(beam.logprob), reason)
        self._finished.append(hypothesis)
        self._finished.sort(key=lambda one: -one.score)  # stable: of equals the earlier one stays ahead
        del self._finished[self.width :]

    def _cannot_improve(self, best: _Continuation) -> bool:
        full = len(self._finished) == self.width
        return full and self._score(best.logprob) <= self._finished[-1].score

    def _score(self, logprob: float) -> float:
        return float(logprob / self._length**self._penalty)


def top_candidates(
    logits: Tensor, number: int, temperature: float = 0.0, *, num_ids: int | None = None
) -> list[list[Candidate]]:
    """The ``number`` likeliest tokens of every row with their log-probabilities (all of them, if there are fewer).

    logits float32 [R, V]; temperature divides them first, near 0 it leaves them; ids from ``num_ids`` on take no part.
    """
    logits = logits[:, :num_ids]
    logprobs = (logits / temperature if temperature >= GREEDY_TEMPERATURE else logits).log_softmax(-1)
    top = logprobs.topk(min(number, logits.shape[1]))
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def _tokens(last: _Link | None) -> list[int]:
    tokens = []
    while last is not None:
        tokens.append(last.token_id)
        last = last.before
    return tokens[::-1]
