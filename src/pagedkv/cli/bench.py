"""`pagedkv bench ...`: measurements that need nothing but this package. Peers are measured by bench/peers/."""

from __future__ import annotations

import typer

from pagedkv.cli.bench_cache import cache

app = typer.Typer(help="Measure the bookkeeping, the kernels or a server.", no_args_is_help=True)
app.command()(cache)
