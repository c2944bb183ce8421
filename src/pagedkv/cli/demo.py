"""`pagedkv demo`: six questions that share one long system prompt, answered through one paged cache.

The first question runs alone and leaves the system prompt's blocks in the prefix cache; the other five arrive
together and compute only what is their own. The table at the end is read off the engine, not worked out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.cli.demo_text import QUESTIONS, SYSTEM_PROMPT
from pagedkv.cli.progress import loading

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkv.engine.outputs import RequestOutput
    from pagedkv.llm import LLM

MAX_TOKENS = 64


@dataclass
class Figures:
    """What the demonstration measured. Tokens, except where a name says otherwise.

    tokens_reused, tokens_computed: partition of the prompt tokens
    blocks_in_use, blocks_without_sharing: at the moment when most blocks were in use
    utilization:   tokens stored over slots of all block tables, at that moment
    seconds:       from the first question to the last answer; tokens_per_second: generated tokens over that
    """

    model: str
    block_size: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    generated_tokens: int = 0
    blocks_in_use: int = 0
    blocks_without_sharing: int = 0
    utilization: float = 0.0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    answers: list[dict[str, str]] = field(default_factory=list)


def demo(
    model: Annotated[str, typer.Option(help="A name, a directory or a .gguf file.")] = "smollm2-135m",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for machines, and nothing else.")] = False,
) -> None:
    """Answer six questions about one long text through one paged cache, and show what sharing saved."""
    from rich.console import Console

    console = Console(quiet=as_json, highlight=False)
    figures = Figures(model)
    with loading(model) as progress:
        from pagedkv.llm import LLM  # torch takes two seconds: the bar stands already

        llm = LLM(model, progress=progress)
    figures.block_size = llm.engine.scheduler.manager.block_size
    _introduce(llm, console)
    began = time.perf_counter()
    for title, questions in (("The first question, alone:", QUESTIONS[:1]), ("Five more, together:", QUESTIONS[1:])):
        console.print(f"\n[bold]{title}[/bold]")
        _ask(llm, questions, figures, console)
    figures.seconds = round(time.perf_counter() - began, 3)
    figures.tokens_per_second = round(figures.generated_tokens / figures.seconds, 1)
    if as_json:
        print(json.dumps(asdict(figures)))
        return
    console.print(_table(figures))
    console.print(f"\nServe it: [bold]pagedkv serve {model}[/bold]  (OpenAI's API, and the cache map at /cache)")


def _introduce(llm: LLM, console: Console) -> None:
    from rich.panel import Panel

    for fact in llm.banner:
        console.print(f"[dim]{fact}[/dim]")
    length = len(llm.tokenizer.encode(SYSTEM_PROMPT, add_special_tokens=False))
    head = "\n".join(SYSTEM_PROMPT.splitlines()[:4])
    console.print(Panel(f"{head}\n[dim]...[/dim]", title=f"the system prompt that all six share: {length} tokens"))


def _ask(llm: LLM, questions: tuple[str, ...], figures: Figures, console: Console) -> None:
    """Runs the questions as one batch, shows their answers as they grow, adds to the figures."""
    from pagedkv.engine.params import SamplingParams

    chats = [[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}] for text in questions]
    prompts: list[Any] = [{"prompt_token_ids": llm.chat_prompt(chat)} for chat in chats]
    answers: list[RequestOutput | None] = [None] * len(questions)
    with _shown(questions, answers, console) as show:
        for output in llm.stream(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)):
            _observe_blocks(llm, figures)
            answers[int(output.request_id)] = output
            show(output)
    for question, output in zip(questions, filter(None, answers), strict=True):
        figures.requests += 1
        figures.prompt_tokens += len(output.prompt_token_ids)
        figures.tokens_reused += output.num_cached_tokens
        figures.tokens_computed += len(output.prompt_token_ids) - output.num_cached_tokens
        figures.generated_tokens += len(output.outputs[0].token_ids)
        figures.answers.append({"question": question, "answer": output.outputs[0].text.strip()})


def _observe_blocks(llm: LLM, figures: Figures) -> None:
    """Keeps the blocks of the fullest moment so far, read off the block tables."""
    manager = llm.engine.scheduler.manager
    in_use = len({block for table in manager.tables.values() for block in table})
    if in_use > figures.blocks_in_use:
        slots = sum(len(table) for table in manager.tables.values())
        figures.blocks_in_use, figures.blocks_without_sharing = in_use, slots
        figures.utilization = round(sum(manager.lengths.values()) / (slots * manager.block_size), 3)


@contextmanager
def _shown(questions: tuple[str, ...], answers: list[RequestOutput | None], console: Console) -> Iterator[Any]:
    """A function that shows an output: redrawn in place on a terminal, once it is finished where output is piped."""
    from rich.live import Live
    from rich.table import Table

    def picture() -> Table:
        grid = Table.grid(padding=(0, 0, 0, 2))
        for question, output in zip(questions, answers, strict=True):
            text = output.outputs[0].text.strip() if output is not None else ""
            grid.add_row(f"[cyan]{question}[/cyan]")
            grid.add_row(_escaped(text) + ("" if output is not None and output.finished else " [dim]...[/dim]"))
        return grid

    if not console.is_terminal:
        yield lambda output: _print_answer(questions, output, console) if output.finished else None
        return
    with Live(picture(), console=console, auto_refresh=False) as live:
        yield lambda _output: live.update(picture(), refresh=True)


def _print_answer(questions: tuple[str, ...], output: RequestOutput, console: Console) -> None:
    console.print(f"[cyan]{questions[int(output.request_id)]}[/cyan]")
    console.print(f"  {_escaped(output.outputs[0].text.strip())}")


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _table(figures: Figures) -> Any:
    from rich.table import Table

    table = Table(title="\nWhat sharing saved", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("this run", justify="right")
    table.add_column("without sharing", justify="right")
    prompt = f"{figures.prompt_tokens:,}"
    table.add_row("prompt tokens", prompt, prompt)
    table.add_row("tokens reused", f"[green]{figures.tokens_reused:,}[/green]", "0")
    table.add_row("tokens computed", f"{figures.tokens_computed:,}", prompt)
    table.add_row(
        f"blocks in use (of {figures.block_size} tokens)",
        f"{figures.blocks_in_use:,}",
        f"{figures.blocks_without_sharing:,}",
    )
    table.add_row("utilisation of the slots", f"{figures.utilization:.1%}", "")
    table.add_row("generated tokens", f"{figures.generated_tokens:,}", "")
    table.add_row("tokens/s (whole run)", f"{figures.tokens_per_second:,.1f}", "")
    return table
