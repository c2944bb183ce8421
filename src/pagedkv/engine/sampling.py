"""From the forward pass of a plan to decided tokens; nothing of the engine's state changes here.

Which chunks give a token: those that reach the last token of their sequence. A root of n samples gives n, all from the
same row of logits; the sequences of the other n - 1 are made here and come to life in commit. A beam gives its
likeliest candidates. A chunk of a prompt whose log-probabilities were asked for gives those too.

Failures are kept apart: a row of bad values is named in ``failed``; if the sampler itself raises, the rows are sampled
one by one, and only those that raise again are named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pagedkv.engine.beam import top_candidates
from pagedkv.engine.logprobs import prompt_logprobs
from pagedkv.engine.outputs import TokenLogprobs
from pagedkv.engine.params import BeamSearchParams, SamplingParams
from pagedkv.engine.plan import Chunk, StepPlan
from pagedkv.engine.request import Request, Sequence
from pagedkv.engine.runner import StepResult
from pagedkv.engine.sampler import Sampler, SampleResult, SampleRow
from pagedkv.engine.stop import Voice


class Drawn(NamedTuple):
    """The next token of a sequence, with its log-probabilities if they were asked for."""

    seq: Sequence
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass
class Samples:
    """What one step gave.

    drawn:   one entry a sequence that goes on or ends, the new samples of a root among them
    forks:   (root, its other samples), not yet known to the scheduler
    beams:   sequences whose ``candidates`` were filled
    scored:  sequences that generate nothing (max_tokens 0): they end here
    failed:  a sequence's age (request key, index) -> what went wrong
    """

    drawn: list[Drawn] = field(default_factory=list)
    forks: list[tuple[Sequence, list[Sequence]]] = field(default_factory=list)
    beams: list[Sequence] = field(default_factory=list)
    scored: list[Sequence] = field(default_factory=list)
    failed: dict[tuple[int, int], str] = field(default_factory=dict)


class Sampling:
    """The sampler, and who is to be sampled."""

    def __init__(self, sampler: Sampler, voice: Callable[[Request], Voice]) -> None:
        self._sampler = sampler
        self._voice = voice  # makes the detokeniser of a new sample

    def sample(self, plan: StepPlan, result: StepResult) -> Samples:
        """Tokens, candidates and log-probabilities of a step whose forward pass is done."""
        samples = Samples()
        chunks = list(plan.chunks.values())
        wanted: list[int] = []  # one entry a row of logits: the index of its chunk
        rows: list[Sequence] = []
        beams: list[int] = []
        for index, chunk in enumerate(chunks):
            seq = chunk.seq
            if seq.request.prompt_logprobs is not None:
                self._score_prompt(index, chunk, result, samples)
            if chunk.end < seq.num_tokens or seq.age in samples.failed:
                continue
            if seq.request.beam is not None:
                beams.append(index)
            elif seq.request.max_new_tokens == 0:
                samples.scored.append(seq)
            else:
                family = self._family(seq, samples)
                rows += family
                wanted += [index] * len(family)
        if rows:
            self._draw(rows, _rows(result, wanted), samples)
        if beams:
            self._search([chunks[i].seq for i in beams], result.last_logits(beams), samples)
        return samples

    def _family(self, seq: Sequence, samples: Samples) -> list[Sequence]:
        """The sequences that one row of logits serves: itself and, at the end of a prompt, the other samples of it."""
        request = seq.request
        if request.num_samples == len(request.sequences):
            return [seq]
        others = [request.fork(seq) for _ in range(request.num_samples - 1)]
        assert seq.row is not None
        for other in others:
            other.row = seq.row.fork(other.tokens, other.index)
            other.voice = self._voice(request)
            other.logprobs = None if seq.logprobs is None else []
        samples.forks.append((seq, others))
        return [seq, *others]

    def _draw(self, sequences: list[Sequence], logits: Tensor, samples: Samples) -> None:
        rows = [seq.row for seq in sequences if seq.row is not None]
        result = self._sample_apart(logits, rows)
        for seq, token_id, logprobs, error in zip(sequences, *result, strict=True):
            if error is None:
                samples.drawn.append(Drawn(seq, token_id, logprobs))
            else:
                samples.failed[seq.age] = error

    def _sample_apart(self, logits: Tensor, rows: list[SampleRow]) -> SampleResult:
        try:
            return self._sampler.sample(logits, rows)
        except Exception as error:
            if len(rows) == 1:
                return SampleResult([-1], [None], [f"sampling failed: {type(error).__name__}: {error}"])
            parts = [self._sample_apart(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
            return SampleResult(
                [part.token_ids[0] for part in parts],
                [part.logprobs[0] for part in parts],
                [part.errors[0] for part in parts],
            )

    def _search(self, sequences: list[Sequence], logits: Tensor, samples: Samples) -> None:
        """Candidates of every beam; ``logits[i]`` is the row of ``sequences[i]``."""
        sane = (~logits.isnan().any(-1) & (logits.amax(-1) < torch.inf)).tolist()
        families: dict[int, list[int]] = {}
        for i, seq in enumerate(sequences):
            if sane[i]:
                families.setdefault(seq.request.key, []).append(i)
            else:
                samples.failed[seq.age] = "the model's logits are not numbers"
        for members in families.values():
            request = sequences[members[0]].request
            assert request.beam is not None
            assert isinstance(request.params, BeamSearchParams)
            found = top_candidates(
                logits[torch.tensor(members, device=logits.device)],
                request.beam.width_of_candidates,
                request.params.temperature,
                num_ids=self._sampler.num_ids,
            )
            for i, candidates in zip(members, found, strict=True):
                sequences[i].candidates = candidates
                samples.beams.append(sequences[i])

    def _score_prompt(self, index: int, chunk: Chunk, result: StepResult, samples: Samples) -> None:
        """Log-probabilities of the prompt tokens that this chunk predicts, as far as they are not known yet."""
        request = chunk.seq.request
        known = request.prompt_logprobs
        assert known is not None
        assert isinstance(request.params, SamplingParams)
        number = request.params.prompt_logprobs
        position = chunk.start + 1  # row i of the chunk predicts the token at start + i + 1
        count = min(chunk.end, chunk.seq.num_prompt_tokens - 1) - chunk.start
        if number is None or count <= 0:
            return
        for logits in result.each_logits(index, chunk, count):
            if bool(logits.isnan().any()):
                samples.failed[chunk.seq.age] = "the model's logits are not numbers"
                return
            new = request.prompt_token_ids[position : position + len(logits)]
            entries = prompt_logprobs(logits, new, number, self._sampler.token_text)
            known += entries[max(0, len(known) - position) :]  # a preempted prompt is computed twice, scored once
            position += len(logits)


def _rows(result: StepResult, wanted: list[int]) -> Tensor:
    """One row of logits for each entry of ``wanted``; the head runs once for each distinct chunk."""
    distinct = list(dict.fromkeys(wanted))
    logits = result.last_logits(distinct)
    if len(distinct) == len(wanted):
        return logits
    place = {index: row for row, index in enumerate(distinct)}
    return logits[torch.tensor([place[index] for index in wanted], device=logits.device)]
