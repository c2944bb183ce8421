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
from pagedkv.cli.chat import chat
from pagedkv.cli.collect_env import collect_env
from pagedkv.cli.complete import complete
from pagedkv.cli.demo import demo
from pagedkv.cli.explain import explain
from pagedkv.cli.help import HelpInParts, spelled_out
from pagedkv.cli.plan import plan
from pagedkv.cli.plot import app as plot
from pagedkv.cli.replay import replay
from pagedkv.cli.run_batch import run_batch
from pagedkv.cli.serve import serve
from pagedkv.errors import PagedKVError

app = typer.Typer(
    name="pagedkv",
    help="A paged KV cache with prefix caching, and a compact engine and server around it.",
    no_args_is_help=True,
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


for verb in (chat, collect_env, complete, demo, explain, plan, replay, run_batch, serve):
    app.command(cls=HelpInParts)(verb)
app.add_typer(bench, name="bench")
app.add_typer(plot, name="plot")


def main() -> None:
    """The console script."""
    try:
        app(spelled_out(sys.argv[1:]))
    except PagedKVError as error:
        print(f"pagedkv: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:  # `pagedkv ... | head`: the reader has what it wanted
        sys.stderr.close()
        raise SystemExit(0) from None
