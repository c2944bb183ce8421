"""``pagedkv chat``: a conversation in the terminal. Ctrl-C stops the answer, not the program; Ctrl-D leaves."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from typing import Annotated, Any

import typer

from pagedkv.cli.options import with_engine_options
from pagedkv.cli.talk import Partner, partner
from pagedkv.errors import PagedKVError

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /help shows this, Ctrl-D leaves"


@with_engine_options
def chat(
    model: Annotated[str | None, typer.Argument(help="A model as for serve; smollm2-135m if left out.")] = None,
    *,
    url: Annotated[str | None, typer.Option(help="Talk to this server instead of loading a model.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key.", envvar="PAGEDKV_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Length limit of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    engine: dict[str, Any],
) -> None:
    """Chat with MODEL; each turn says how much of the conversation the prefix cache had."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    with closing(partner(model, url, api_key, engine)) as someone:
        if sys.stdin.isatty():
            import readline  # noqa: F401  (line editing and history for input())

            typer.secho(HELP, err=True, dim=True)
        while (text := _ask()) is not None:
            if text.startswith("/"):
                messages = _command(text, messages)
            elif text:
                _turn(someone, messages, text, {"max_tokens": max_tokens, "temperature": temperature})


def _ask() -> str | None:
    """A line of the user's, or None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            print()
        return None


def _command(text: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    name, _, rest = text.partition(" ")
    system = [message for message in messages if message["role"] == "system"]
    if name == "/reset":
        typer.secho("forgotten", err=True, dim=True)
        return system
    if name == "/system" and rest.strip():
        others = [message for message in messages if message["role"] != "system"]
        return [{"role": "system", "content": rest.strip()}, *others]
    typer.secho(HELP, err=True, dim=True)
    return messages


def _turn(someone: Partner, messages: list[dict[str, str]], text: str, params: dict[str, Any]) -> None:
    """One question and its answer. An answer that was stopped stays in the conversation as far as it got."""
    messages.append({"role": "user", "content": text})
    answer, began, stopped = "", time.perf_counter(), False
    pieces = someone.chat(messages, **params)
    try:
        for piece in pieces:
            answer += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        stopped = True
        pieces.close()  # type: ignore[attr-defined]
    except PagedKVError as error:
        messages.pop()
        typer.secho(f"\n{error}", err=True, fg="red")
        return
    print()
    messages.append({"role": "assistant", "content": answer})
    usage, seconds = someone.usage, time.perf_counter() - began
    note = "stopped" if stopped else f"{usage.completion_tokens / seconds:.0f} tok/s"
    typer.secho(f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; {note}]", err=True, dim=True)
