"""The command line: one verb per file, gathered here.

A verb's file imports nothing heavy at its top (torch alone costs two seconds), so ``pagedkv --version`` and ``--help``
answer at once. What a user can cause arrives here as a PagedKVError and ends as one line on stderr and status 1.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pagedkv import __version__
from pagedkv.cli.bench import app as bench
from pagedkv.cli.demo import demo
from pagedkv.cli.replay import replay
from pagedkv.cli.serve import serve
from pagedkv.errors import PagedKVError

app = typer.Typer(
    name="pagedkv",
    help="A paged KV cache with prefix caching, and a compact engine and server around it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagedkv {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """A paged KV cache with prefix caching, and a compact engine and server around it."""


for verb in (demo, replay, serve):
    app.command()(verb)
app.add_typer(bench, name="bench")


def main() -> None:
    """The console script."""
    try:
        app()
    except PagedKVError as error:
        print(f"pagedkv: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:  # `pagedkv ... | head`: the reader has what it wanted
        sys.stderr.close()
        raise SystemExit(0) from None
