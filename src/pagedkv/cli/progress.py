"""A progress bar while weights load: on stderr, and only where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def loading(model: str) -> Iterator[Callable[[int, int], None]]:
    """Gives the ``progress(done, total)`` callback of ``LLM``, in bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(model, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
