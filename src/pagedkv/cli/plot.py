"""`pagedkv plot`: the pictures of the documentation, and yours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Draw what blocks waste and what sharing saves (PNG and SVG).", no_args_is_help=True)

Folder = Annotated[Path, typer.Option("--out", help="Folder for the pictures.")]


@app.command()
def utilisation(
    out: Folder = Path("."),
    lengths: Annotated[str | None, typer.Option(help="Lengths with commas; left out: the chapter's 32.")] = None,
) -> None:
    """Utilisation of the slots against block sizes from 1 to 128."""
    from pagedkv.errors import InvalidRequest
    from pagedkv.insight.plots import plot_utilization
    from pagedkv.insight.waste import chapter_lengths

    try:
        chosen = chapter_lengths() if lengths is None else [int(part) for part in lengths.split(",")]
    except ValueError:
        chosen = []
    if not chosen or min(chosen) < 1:
        raise InvalidRequest(f"lengths is {lengths!r}; whole numbers of at least 1 are needed", field="lengths")
    for path in plot_utilization(chosen, out):
        print(path)


@app.command()
def prefix(
    out: Folder = Path("."),
    shared: Annotated[int, typer.Option(help="Tokens that all requests begin with.", min=0)] = 96,
    own: Annotated[int, typer.Option(help="Tokens of each request's own.", min=1)] = 8,
    requests: Annotated[int, typer.Option(help="As many requests as this.", min=2)] = 32,
    block_size: Annotated[int, typer.Option(help="Tokens a block.", min=1)] = 16,
) -> None:
    """Prompt tokens computed against the number of requests that share a prefix."""
    from pagedkv.insight.plots import plot_prefix

    for path in plot_prefix(shared, own, requests, block_size, out):
        print(path)


@app.command()
def replay(
    out: Folder = Path("."),
    requests: Annotated[int, typer.Option(help="Requests of the made-up traffic.", min=1)] = 2000,
    chats: Annotated[int, typer.Option(help="Chats under way at a time.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Another seed, other traffic.")] = 0,
) -> None:
    """Tokens hit against the size of the pool, for each eviction policy, over made-up chats and strangers.

    Recorded traffic is drawn by `pagedkv replay TRACE --compare --blocks 1000,2000,... --plot DIR`.
    """
    from pagedkv.cache.policies import POLICIES
    from pagedkv.insight.plots import plot_replay
    from pagedkv.insight.replay import replay_sequential
    from pagedkv.insight.synthetic import synthetic_trace

    trace = synthetic_trace(requests, open_chats=chats, seed=seed)
    pools = [64 * 2**step for step in range(7)]
    reports = [replay_sequential(trace, num_blocks=pool, policy=policy) for policy in POLICIES for pool in pools]
    for path in plot_replay(reports, out):
        print(path)
