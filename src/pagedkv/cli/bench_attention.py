"""`pagedkv bench attention`: the CPU kernels against the memory's speed and against torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pagedkv.insight.attention_rates import Rate


def attention(
    what: Annotated[str, typer.Option(help="A1 decode, A2 prefill, A3 shared prefixes, Q quantised; with commas.")] = (
        "A1,Q,A2,A3"
    ),
    rounds: Annotated[int, typer.Option(help="Rounds of each case.", min=1)] = 7,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 2,
    full: Annotated[bool, typer.Option(help="Every batch, context and block size of A1.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for machines, and nothing else.")] = False,
) -> None:
    """Bytes of K and V a second over the streaming rate; prefill and shared prefixes against torch and plain."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    figures = {name: measure(name, rounds, full) for name in what.split(",")}
    if as_json:
        print(json.dumps({name: [rate.as_dict() for rate in rates] for name, rates in figures.items()}))
        return
    for name, rates in figures.items():
        show(name, rates)


def measure(what: str, rounds: int, full: bool) -> list[Rate]:
    from pagedkv.insight import attention_rates as rates

    if what == "A1":
        return [rates.decode_rate(case, rounds) for case in rates.decode_cases(quick=not full)]
    if what == "Q":
        return [rates.decode_rate(case, rounds, against_torch=False) for case in rates.quantised_cases()]
    if what == "A2":
        few = max(1, rounds // 2)
        return [rates.prefill_rate(tokens, *shape, few) for shape in ((64, 9, 3), (128, 8, 2))
                for tokens in (512, 2048, 8192)]  # fmt: skip
    if what == "A3":
        return [rates.shared_prefix_rate(*shape, rounds) for shape in ((64, 3, 3), (64, 1, 8), (64, 4, 4), (128, 4, 2))]
    raise typer.BadParameter(f"{what!r}; known are A1, Q, A2 and A3", param_hint="--what")


def show(what: str, rates: list[Rate]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=what, title_justify="left")
    for column in ("case", "ms", "spread", "GB/s", "streaming", "share", "torch ms", "times"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for rate in rates:
        numbers = (rate.gb_s, rate.stream_gb_s, rate.share, rate.torch_ms, rate.times)
        spread = f"{rate.spread_ms[0]:.2f}-{rate.spread_ms[1]:.2f}"
        table.add_row(rate.name, f"{rate.ms:.3f}", spread, *("" if x is None else f"{x:.2f}" for x in numbers))
    Console(width=170).print(table)
