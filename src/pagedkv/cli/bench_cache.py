"""`pagedkv bench cache`: how fast manager and prefix cache are, operation by operation and over a trace."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pagedkv.insight.replay import ReplayReport


def cache(
    trace: Annotated[Path | None, typer.Argument(help="Also replay this trace, once per block size.")] = None,
    block_sizes: Annotated[str, typer.Option(help="Block sizes of the replay, with commas.")] = "512,16",
    blocks: Annotated[str, typer.Option(help="Pool of each replay, with commas; 0: no limit.")] = "20000,640000",
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for machines, and nothing else.")] = False,
) -> None:
    """Operations a second of the bookkeeping, without a model."""
    from pagedkv.insight.bookkeeping import operation_rates

    rates = operation_rates()
    reports = [] if trace is None else _replays(trace, block_sizes, blocks, limit)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if as_json:
        replays = [report.as_dict() for report in reports]
        print(json.dumps({"operations": [asdict(rate) for rate in rates], "replays": replays, "peak_mib": peak}))
        return
    _show(rates, reports)
    typer.echo(f"peak memory of this process: {peak:,.0f} MiB")


def _replays(trace: Path, block_sizes: str, blocks: str, limit: int | None) -> list[ReplayReport]:
    from pagedkv.insight.replay import replay_sequential
    from pagedkv.insight.trace import read_trace

    traffic = read_trace(trace, limit)
    pairs = zip(block_sizes.split(","), blocks.split(","), strict=True)
    return [
        replay_sequential(traffic, num_blocks=int(pool) or None, block_size=int(size), yardsticks=False)
        for size, pool in pairs
    ]


def _show(rates: list[Any], reports: list[ReplayReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"prompts of {rates[0].blocks} blocks of 16 tokens", title_justify="left")
    for name in ("operation", "us/call", "us/block", "calls/s"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    for rate in rates:
        figures = (f"{rate.us_per_call:,.2f}", f"{rate.us_per_block:.3f}", f"{rate.calls_per_second:,.0f}")
        table.add_row(rate.operation, *figures)
    console.print(table)
    for report in reports:
        pool = f"{report.num_blocks:,} blocks" if report.limited else "no limit"
        console.print(
            f"{report.trace}, block {report.block_size}, {pool}: {report.block_references:,} block references in "
            f"{report.seconds:.2f} s, {report.us_per_block:.2f} us each; {report.token_hit_rate:.2%} of tokens hit"
        )
