"""`pagedkv replay`: what another pool size, block size or eviction policy would do to recorded traffic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.cache.policies import POLICIES
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.insight.replay import Progress, ReplayReport
    from pagedkv.insight.step_cost import StepCost
    from pagedkv.insight.timed import TimedReport
    from pagedkv.insight.trace import Trace


def replay(
    trace: Annotated[Path, typer.Argument(help="A .jsonl (Mooncake, or recorded by serve --record) or Azure .csv.")],
    blocks: Annotated[
        str | None, typer.Option(help="Blocks of the pool; several with --compare: 5000,10000. Left out: no limit.")
    ] = None,
    block_size: Annotated[str | None, typer.Option(help="Tokens a block; several with --compare.")] = None,
    policy: Annotated[str, typer.Option(help=f"Eviction: {', '.join(POLICIES)}; several with --compare.")] = "lru",
    compare: Annotated[bool, typer.Option(help="A table over pool sizes, block sizes and policies.")] = False,
    timed: Annotated[
        bool, typer.Option("--timed/--sequential", help="Arrivals through the scheduler, or one after another.")
    ] = False,
    speed: Annotated[float, typer.Option(help="--timed: arrivals this many times as fast.", min=1e-6)] = 1.0,
    cost: Annotated[
        str | None, typer.Option(help="--timed: a file of `bench steps --save`, or its terms: 8e-3,6e-4,5e-7.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many requests.", min=1)] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves of --compare into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for machines, and nothing else.")] = False,
) -> None:
    """Drive the real manager, prefix cache and scheduler with recorded traffic, and report what came of it."""
    from pagedkv.insight.trace import read_trace

    traffic = read_trace(trace, limit)
    pools, sizes, policies = _ints(blocks, "blocks"), _ints(block_size, "block_size"), policy.split(",")
    if plot is not None and not compare:
        raise InvalidRequest("--plot draws the curves of --compare", field="plot")
    if not compare and max(len(pools), len(sizes), len(policies)) > 1:
        raise InvalidRequest("several pools, block sizes or policies need --compare", field="compare")
    if compare and policy == "lru":
        policies = list(POLICIES)
    reports: list[Any] = []
    for size, pool, name in product(sizes, pools, policies):
        with _progress(f"{traffic.name} {name}") as progress:
            reports.append(_run(traffic, (pool, size, name), _cost(cost) if timed else None, speed, progress))
    if as_json:
        figures = [report.as_dict() for report in reports]
        print(json.dumps(figures if compare else figures[0]))
    elif timed:
        _show_timed(reports)
    else:
        _show(reports)
    if plot is not None:
        from pagedkv.insight.plots import plot_replay

        for path in plot_replay(reports, plot):
            typer.echo(f"wrote {path}", err=True)


def _run(
    traffic: Trace, choice: tuple[int | None, int | None, str], cost: StepCost | None, speed: float, progress: Progress
) -> ReplayReport | TimedReport:
    from pagedkv.insight.replay import replay_sequential

    pool, size, policy = choice
    if cost is None:
        return replay_sequential(traffic, num_blocks=pool, block_size=size, policy=policy, progress=progress)
    from pagedkv.insight.timed import replay_timed

    if pool is None:
        raise InvalidRequest("--timed needs --blocks: the pool of the engine that is replayed", field="blocks")
    return replay_timed(
        traffic, num_blocks=pool, block_size=size, policy=policy, cost=cost, speed=speed, progress=progress
    )


def _cost(text: str | None) -> StepCost:
    from pagedkv.insight.step_cost import StepCost

    return StepCost() if text is None else StepCost.parse(text)


def _ints(text: str | None, name: str) -> list[Any]:
    if text is None:
        return [None]
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{name} is {text!r}; whole numbers with commas are needed", field=name) from None
    if min(values) < 1:
        raise InvalidRequest(f"{name} is {min(values)}; at least 1 is needed", field=name)
    return values


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)

        def told(done: int, total: int) -> None:
            if done % 64 == 0 or done == total:
                bar.update(task, completed=done, total=total)

        yield told


def _show(reports: list[ReplayReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = reports[0]
    table = Table(
        title=f"{first.trace}: {first.num_requests:,} requests, {first.num_prompt_tokens:,} prompt tokens; "
        f"a cache without limit hits {first.infinite_hit_rate or 0:.1%}",
        title_justify="left",
    )
    for name in ("blocks", "block size", "policy", "tokens hit", "optimum", "evictions", "utilisation", "us/block"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for report in reports:
        table.add_row(
            f"{report.num_blocks:,}" if report.limited else f"{report.num_cached:,} (no limit)",
            str(report.block_size),
            report.policy,
            f"{report.token_hit_rate:.2%}",
            f"{report.optimum_hit_rate or 0:.2%}",
            f"{report.evictions:,}",
            f"{report.utilization:.1%}",
            f"{report.us_per_block:.2f}",
        )
    Console().print(table)
    refused = max(report.num_refused for report in reports)
    if refused:
        Console().print(f"{refused:,} requests are larger than the smallest pool; their tokens count as not hit")


def _show_timed(reports: list[TimedReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = reports[0]
    table = Table(title=f"{first.trace}: {first.num_requests:,} requests on a virtual clock", title_justify="left")
    table.add_column("")
    for report in reports:
        table.add_column(f"{report.policy}, {report.num_blocks:,} x {report.block_size}", justify="right")
    rows = {
        "tokens hit": [f"{r.token_hit_rate:.2%}" for r in reports],
        "TTFT median / p90 / p99, s": [f"{r.ttft_median:.3f} / {r.ttft_p90:.3f} / {r.ttft_p99:.3f}" for r in reports],
        "end to end median / p99, s": [f"{r.e2e_median:.3f} / {r.e2e_p99:.3f}" for r in reports],
        "duration, s": [f"{r.duration:,.1f}" for r in reports],
        "output tokens/s": [f"{r.output_throughput:,.1f}" for r in reports],
        "evictions": [f"{r.evictions:,}" for r in reports],
        "preemptions (tokens again)": [f"{r.preemptions:,} ({r.recomputed_tokens:,})" for r in reports],
        "refused": [f"{r.num_refused:,}" for r in reports],
        "utilisation": [f"{r.utilization:.1%}" for r in reports],
        "us a step, scheduler and cache": [f"{r.us_per_step:,.0f}" for r in reports],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    Console().print(table)
