"""``pagedkv bench throughput`` and ``bench latency``: the engine without a server."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedkv.cli.bench_load import Shape, show
from pagedkv.cli.options import with_engine_options

Model = Annotated[str, typer.Argument(help="A model as for serve.")]


def _load(model: str, engine: dict[str, Any]) -> Any:
    from pagedkv.cli.progress import loading

    with loading(model) as progress:
        from pagedkv.llm import LLM

        return LLM(model, progress=progress, **engine)


@with_engine_options
def throughput(
    model: Model = "smollm2-135m",
    *,
    dataset_name: Annotated[str, typer.Option(help="random, prefix_repetition or trace.")] = "random",
    trace: Annotated[Path | None, typer.Option(help="File for --dataset-name trace.", exists=True)] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests, all there from the start.", min=1)] = 32,
    input_len: Annotated[int, typer.Option(help="Prompt tokens (of their own).", min=1)] = 256,
    output_len: Annotated[int, typer.Option(help="Generated tokens.", min=1)] = 64,
    prefix_len: Annotated[int, typer.Option(help="prefix_repetition: shared tokens.")] = 512,
    num_prefixes: Annotated[int, typer.Option(help="prefix_repetition: prefixes.", min=1)] = 4,
    save_result: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    engine: dict[str, Any],
) -> None:
    """Tokens a second with everything queued at once."""
    from pagedkv.engine.params import SamplingParams

    llm = _load(model, engine)
    shape = Shape(dataset_name, num_prompts, input_len, output_len, prefix_len, num_prefixes, trace)
    loads = shape.loads(llm.model_config.vocab_size)
    params = [SamplingParams(temperature=0, max_tokens=load.output_len, ignore_eos=True) for load in loads]
    llm.generate([loads[0].prompt[:16]], SamplingParams(max_tokens=2), use_tqdm=False)
    before = llm.stats()
    begin = time.perf_counter()
    outputs = llm.generate([load.prompt for load in loads], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    stats = llm.stats()
    tokens_in = sum(len(output.prompt_token_ids) for output in outputs)
    tokens_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    result = {
        "model": model,
        "duration": seconds,
        "completed": len(outputs),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "total_cached_tokens": stats.prefix_hits - before.prefix_hits,
        "num_preemptions": stats.num_preemptions - before.num_preemptions,
        "request_throughput": len(outputs) / seconds,
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
    }
    show("offline throughput", result, save_result)


@with_engine_options
def latency(
    model: Model = "smollm2-135m",
    *,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.", min=1)] = 512,
    output_len: Annotated[int, typer.Option(help="Generated tokens.", min=2)] = 128,
    batch_size: Annotated[int, typer.Option(help="Requests at a time.", min=1)] = 1,
    num_iters: Annotated[int, typer.Option(help="Measured runs; one more comes first.", min=1)] = 5,
    save_result: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    engine: dict[str, Any],
) -> None:
    """Time of one batch from start to end: first token, each further token, all."""
    from pagedkv.engine.params import SamplingParams

    llm = _load(model, {**engine, "enable_prefix_caching": False})
    ttft, tpot, whole = [], [], []
    for iteration in range(num_iters + 1):
        loads = Shape("random", batch_size, input_len, output_len, seed=iteration).loads(llm.model_config.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.generate([load.prompt for load in loads], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if iteration:
            first = max(output.metrics.time_to_first_token or 0.0 for output in outputs)
            ttft.append(1e3 * first)
            tpot.append(1e3 * (seconds - first) / (output_len - 1))
            whole.append(seconds)
    result = {
        "model": model,
        "batch_size": batch_size,
        "median_ttft_ms": statistics.median(ttft),
        "median_tpot_ms": statistics.median(tpot),
        "prefill_throughput": batch_size * input_len / statistics.median(ttft) * 1e3,
        "decode_throughput": batch_size * 1e3 / statistics.median(tpot),
        "avg_latency": statistics.fmean(whole),
        "median_latency": statistics.median(whole),
    }
    show(f"latency: {input_len} tokens in, {output_len} out, batch of {batch_size}", result, save_result)
