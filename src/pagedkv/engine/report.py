"""A Request as its caller sees it."""

from __future__ import annotations

from dataclasses import replace

from pagedkv.engine.beam import BeamSearch, Hypothesis
from pagedkv.engine.outputs import CompletionOutput, RequestOutput
from pagedkv.engine.request import Request, Sequence
from pagedkv.model.tokenizer import Tokenizer


def output_of(request: Request) -> RequestOutput:
    """Everything it has produced so far. What may still change is copied."""
    outputs = [_sample(seq) for seq in request.sequences] if request.beam is None else request.best
    known = request.prompt_logprobs
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=outputs,
        finished=request.finished,
        prompt_logprobs=None if known is None else known.copy(),
        num_cached_tokens=request.num_cached_tokens,
        report=request.report,
        metrics=replace(request.metrics),
        error=request.error,
    )


def _sample(seq: Sequence) -> CompletionOutput:
    return CompletionOutput(
        index=seq.index,
        text=seq.voice.text if seq.voice is not None else "",
        token_ids=seq.output_token_ids,
        cumulative_logprob=None if seq.logprobs is None else seq.cumulative_logprob,
        logprobs=None if seq.logprobs is None else seq.logprobs.copy(),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
    )


def beams_of(search: BeamSearch, tokenizer: Tokenizer | None, *, aborted: bool = False) -> list[CompletionOutput]:
    """The finished hypotheses of a search, best first; the EOS that ended one is not part of its text."""
    return [
        CompletionOutput(
            index=index,
            text=_text(found, tokenizer),
            token_ids=found.tokens,
            cumulative_logprob=found.cumulative_logprob,
            finish_reason="abort" if aborted else found.finish_reason,
            score=found.score,
        )
        for index, found in enumerate(search.hypotheses())
    ]


def _text(found: Hypothesis, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    return tokenizer.decode(found.tokens[:-1] if found.finish_reason == "stop" else found.tokens)
