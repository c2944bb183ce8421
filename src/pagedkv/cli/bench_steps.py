"""``pagedkv bench steps``: what a step of a model takes on this machine, as terms for ``replay --timed``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.cli.options import with_engine_options

if TYPE_CHECKING:
    from pagedkv.insight.step_cost import StepFit


@with_engine_options
def steps(
    model: Annotated[str, typer.Argument(help="A model as for serve.")] = "smollm2-135m",
    *,
    save: Annotated[Path | None, typer.Option(help="Write the terms here, for replay --timed --cost FILE.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for machines, and nothing else.")] = False,
    engine: dict[str, Any],
) -> None:
    """Time steps of many shapes through the engine and fit what a step, a token and its context cost."""
    from pagedkv.cli.progress import loading

    with loading(model) as progress:
        from pagedkv.insight.step_cost import fit_step_cost, measure_steps
        from pagedkv.llm import LLM

        llm = LLM(model, progress=progress, **{**engine, "enable_prefix_caching": False})
    fit = fit_step_cost(measure_steps(llm))
    figures = {"model": model, **fit.as_dict()}
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(json.dumps(figures, indent=1) + "\n")
    if as_json:
        print(json.dumps(figures))
    else:
        _show(fit, model)


def _show(fit: StepFit, model: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"steps of {model}", title_justify="left")
    for name in ("tokens", "context", "pairs", "measured, ms", "fitted, ms", "error"):
        table.add_column(name, justify="right")
    for sample, error in zip(fit.samples, fit.errors, strict=True):
        counts = (f"{count:,}" for count in sample.shape)
        fitted = fit.cost.seconds(sample.shape)
        table.add_row(*counts, f"{1e3 * sample.seconds:.2f}", f"{1e3 * fitted:.2f}", f"{error:.0%}")
    Console().print(table)
    cost = fit.cost
    typer.echo(
        f"--cost {cost.fixed:.3g},{cost.per_token:.3g},{cost.per_context:.3g},{cost.per_pair:.3g}   "
        f"error: median {fit.median_error:.1%}, at most {fit.max_error:.1%}"
    )
