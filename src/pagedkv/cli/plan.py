"""`pagedkv plan MODEL`: how much memory it needs and how many requests fit, before anything is loaded or bought."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.cli.options import parse_bytes
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.insight.plan import MemoryPlan, WasteRow
    from pagedkv.model.config import ModelConfig

_COMPARED = ("auto", "int8_per_token_head", "fp8_e4m3")
_SPREAD = 64  # lengths that stand for a range


def plan(
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, smollm2-135m or a Hugging Face id.")],
    memory: Annotated[
        int | None,
        typer.Option(help="What there is; left out: what this machine has now.", parser=parse_bytes, metavar="SIZE"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="int4 or int8, in groups of 32; none widens a GGUF.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="How KV is stored.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens a block.", min=1)] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a full step.", min=1)] = 2048,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of a request, prompt and output: 20:500 or 100,900.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Take the lengths of this trace.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Memory for as many requests at a time.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for machines, and nothing else.")] = False,
) -> None:
    """Bytes per token and block, blocks and requests that fit, waste per block size. Reads no weights."""
    from pagedkv.engine.sizing import available_memory
    from pagedkv.insight.plan import plan_memory, pool_bytes, waste_rows, weight_bytes

    config, chosen, types = _read(model, dtype)
    room = available_memory() if memory is None else memory
    if room is None:
        raise InvalidRequest("this machine does not say how much memory it has; give --memory", field="memory")
    asked = _lengths(lengths, trace)
    weights = weight_bytes(config, chosen, quantization=quantization, types=types)
    plans = [
        plan_memory(
            config,
            room,
            weights=weights,
            dtype=chosen,
            kv_dtype=kv,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            lengths=asked,
        )
        for kv in dict.fromkeys((kv_cache_dtype, *_COMPARED))
    ]
    waste = waste_rows(asked, plans[0].token_bytes) if asked else []
    needed = pool_bytes(asked or [config.max_position_embeddings], concurrency or 0, plans[0])
    if as_json:
        figures = {"model": model, "dtype": chosen, "plans": [asdict(each) for each in plans]}
        print(json.dumps({**figures, "waste": [asdict(row) for row in waste], "bytes_for_concurrency": needed}))
        return
    _show(model, config, chosen, plans)
    if asked:
        _show_waste(asked, waste)
    if concurrency:
        whole = needed + plans[0].weight_bytes + plans[0].activation_bytes
        print(f"{concurrency:,} requests at a time need {_size(needed)} of KV, {_size(whole)} in all.")


def _read(model: str, dtype: str) -> tuple[ModelConfig, str, dict[str, str]]:
    """Configuration, dtype and, of a GGUF file, the type of each tensor."""
    from pagedkv.model.hub import resolve
    from pagedkv.model.load import pick_device, pick_dtype, read_config

    config = read_config(model)
    chosen = str(pick_dtype(dtype, config, pick_device("auto"))).removeprefix("torch.")
    files = resolve(model, weights=False)
    if not files.is_gguf:
        return config, chosen, {}
    from gguf import GGMLQuantizationType

    from pagedkv.model.gguf import GGUFFile

    tensors = GGUFFile(files.weights[0]).tensors
    return (
        config,
        chosen,
        {name.removesuffix(".weight"): GGMLQuantizationType(info.ggml_type).name for name, info in tensors.items()},
    )


def _lengths(text: str | None, trace: Path | None) -> list[int]:
    if trace is not None:
        from pagedkv.insight.trace import read_trace

        return [r.num_prompt_tokens + r.num_output_tokens for r in read_trace(trace).requests]
    if text is None:
        return []
    try:
        low, colon, high = text.partition(":")
        if not colon:
            found = [int(part) for part in text.split(",")]
        else:
            first, last = int(low), int(high)
            found = [first + (last - first) * i // (_SPREAD - 1) for i in range(_SPREAD)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise InvalidRequest(f"lengths is {text!r}; write 20:500 or 100,900, at least 1 each", field="lengths")
    return found


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count:,} B"


def _show(model: str, config: ModelConfig, dtype: str, plans: list[MemoryPlan]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = plans[0]
    print(
        f"{model}: {config.architecture}, {config.num_layers} layers, {config.num_kv_heads} KV heads of "
        f"{config.head_dim}, {dtype}\n"
        f"weights {_size(first.weight_bytes)}, activations of a full step {_size(first.activation_bytes)}, "
        f"memory {_size(first.memory)}"
    )
    table = Table(title=f"KV in blocks of {first.block_size} tokens", title_justify="left")
    for name in ("stored as", "a token", "a block", "blocks that fit", "tokens that fit", "requests at a time"):
        table.add_column(name, justify="left" if name == "stored as" else "right")
    for each in plans:
        table.add_row(
            each.kv_dtype,
            _size(each.token_bytes),
            _size(each.block_bytes),
            f"{each.num_blocks:,}",
            f"{each.num_tokens:,}",
            "" if each.requests is None else f"{each.requests:,}",
        )
    Console().print(table)


def _show_waste(lengths: list[int], rows: list[WasteRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{len(lengths):,} requests of {min(lengths):,} to {max(lengths):,} tokens, all at once"
    table = Table(title=title, title_justify="left")
    for name in ("block size", "utilisation", "wasted", "table entries"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(str(row.block_size), f"{row.utilization:.1%}", _size(row.wasted_bytes), f"{row.table_entries:,}")
    Console().print(table)
