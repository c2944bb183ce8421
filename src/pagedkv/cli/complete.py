"""``pagedkv complete``: one prompt in, its continuation out, as it comes."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated, Any

import typer

from pagedkv.cli.options import with_engine_options
from pagedkv.cli.talk import partner


@with_engine_options
def complete(
    prompt: Annotated[str, typer.Argument(help="The text to go on with; - reads it from standard input.")],
    *,
    model: Annotated[str | None, typer.Option(help="A model as for serve; smollm2-135m if left out.")] = None,
    url: Annotated[str | None, typer.Option(help="Ask this server instead of loading a model.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="PAGEDKV_API_KEY")] = None,
    max_tokens: Annotated[int, typer.Option(help="Length limit.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    n: Annotated[int | None, typer.Option(hidden=True)] = None,
    seed_: Annotated[int | None, typer.Option("--sampling-seed", help="Makes the sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be repeated.")] = None,
    engine: dict[str, Any],
) -> None:
    """Continue PROMPT and print what comes."""
    if n not in (None, 1):
        raise typer.BadParameter("one continuation at a time; ask a server for n", param_hint="--n")
    text = sys.stdin.read() if prompt == "-" else prompt
    params: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed_, "stop": stop}
    given = {name: value for name, value in params.items() if value is not None}
    with closing(partner(model, url, api_key, engine)) as someone:
        for piece in someone.complete(text, **given):
            print(piece, end="", flush=True)
    print()
