"""`pagedkv bench ...`: measurements that need nothing but this package. Peers are measured by bench/peers/."""

from __future__ import annotations

import typer

from pagedkv.cli.bench_attention import attention
from pagedkv.cli.bench_cache import cache
from pagedkv.cli.bench_offline import latency, throughput
from pagedkv.cli.bench_serve import serve
from pagedkv.cli.bench_steps import steps
from pagedkv.cli.help import HelpInParts

app = typer.Typer(help="Measure the bookkeeping, the kernels or a server.", no_args_is_help=True)
for verb in (attention, cache, latency, serve, steps, throughput):
    app.command(cls=HelpInParts)(verb)
