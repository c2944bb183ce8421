"""Help in parts: a verb with many flags shows on one screen what most people need, and the rest by group.

pagedkv serve --help            the flags most used, and the names of the groups
pagedkv serve --help=access     one group; --help=all shows every flag, as in vLLM
pagedkv serve --help=prefix     the flags whose name or text has to do with it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

MOST_USED = frozenset({
    *("host", "port", "api_key", "served_model_name"),
    *("quantization", "max_model_len", "kv_cache_memory_bytes", "kv_cache_dtype", "max_num_seqs"),
})  # fmt: skip
_TOPIC = "pagedkv.cli.help.topic"


class HelpInParts(TyperCommand):
    """A command whose flags carry the name of their group as ``rich_help_panel``; its own flags carry none."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        topic = ctx.meta.get(_TOPIC)
        groups = list(dict.fromkeys(p.rich_help_panel for p in self._grouped()))
        if not groups or topic == "all":
            return super().format_help(ctx, formatter)
        shown, flags, epilog = self._shown(topic), self._grouped(), self.epilog
        before = [(param, param.hidden, param.rich_help_panel) for param in flags]
        try:
            for param in flags:
                param.hidden = param.hidden or not shown(param)
                if topic is None:
                    param.rich_help_panel = None  # one list
            if topic is None:
                self.epilog = f"More flags: --help=all, or one of --help={'|'.join(group_id(g) for g in groups)}"
            super().format_help(ctx, formatter)
        finally:
            self.epilog = epilog
            for param, hidden, panel in before:
                param.hidden, param.rich_help_panel = hidden, panel

    def _grouped(self) -> list[Any]:
        return [param for param in self.params if getattr(param, "rich_help_panel", None)]

    def _shown(self, topic: str | None) -> Callable[[Any], bool]:
        if topic is None:
            return lambda param: param.name in MOST_USED
        groups = {group_id(param.rich_help_panel) for param in self._grouped()}
        wanted = group_id(topic)
        if wanted in groups:
            return lambda param: group_id(param.rich_help_panel) == wanted

        def tells_of(param: Any) -> bool:
            return wanted in f"{' '.join(param.opts)} {param.help}".lower()

        if not any(tells_of(param) and not param.hidden for param in self._grouped()):
            known = ", ".join(sorted(groups))
            raise typer.BadParameter(f"no flag has to do with {topic!r}; groups: {known}, all", param_hint="--help")
        return tells_of


def group_id(panel: str) -> str:
    """What a group is called on the command line."""
    return panel.lower().replace(" ", "-").replace("_", "-")


def _print_topic(ctx: typer.Context, topic: str | None) -> None:
    if topic is None:
        return
    ctx.meta[_TOPIC] = topic
    typer.echo(ctx.get_help())
    raise typer.Exit


HelpFor = Annotated[
    str | None, typer.Option("--help-for", hidden=True, is_eager=True, callback=_print_topic, metavar="GROUP")
]


def spelled_out(arguments: list[str]) -> list[str]:
    """``--help=GROUP`` as the option that takes a value; a plain ``--help`` takes none."""
    return [f"--help-for={word[7:]}" if word.startswith("--help=") else word for word in arguments]
