"""`pagedkv explain A B`: how much of prompt B comes out of the cache after prompt A, and where they part."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.errors import InvalidRequest


def explain(
    prompt_a: Annotated[str, typer.Argument(help="A text, or @FILE. Computed first.")],
    prompt_b: Annotated[str, typer.Argument(help="A text, or @FILE. What does it find?")],
    model: Annotated[str, typer.Option(help="Whose tokenizer and template.")] = "smollm2-135m",
    block_size: Annotated[int, typer.Option(help="Tokens a block.", min=1)] = 16,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is one user's message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for machines, and nothing else.")] = False,
) -> None:
    """Where two prompts part in tokens and blocks, template and tokenizer included. Loads no weights."""
    from pagedkv.insight.explain import compare_texts, tell
    from pagedkv.model.hub import resolve
    from pagedkv.model.load import tokenizer_of

    tokenizer = tokenizer_of(resolve(model))
    texts = [_text(prompt_a), _text(prompt_b)]
    if chat:
        texts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
    found = compare_texts(
        texts[0],
        texts[1],
        lambda text: tokenizer.encode(text, add_special_tokens=not chat),
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        block_size,
    )
    print(json.dumps(asdict(found)) if as_json else tell(found))


def _text(given: str) -> str:
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{given}: {error}", field="prompt") from error
