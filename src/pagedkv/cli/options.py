"""The flags that every verb with an engine takes: the Python names of ``LLM`` in kebab case, as in vLLM.

A verb takes them as one argument ``engine`` (a dictionary of keyword arguments for ``LLM`` / ``AsyncLLM``) and is
wrapped with ``with_engine_options``, which puts the single flags in its place. A flag that is left out is not in the
dictionary, so the defaults stand in one place, ``config.py``.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from pagedkv.cli.help import HelpFor

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_UNITS["ti"] = 1 << 40
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """``512MiB``, ``2GiB``, ``1.5g`` or a plain number of bytes (a default comes as one)."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 512MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def flag(name: str, kind: Any, panel: str, help_text: str, **options: Any) -> inspect.Parameter:
    spelled = options.pop("spelled", f"--{name.replace('_', '-')}")
    option = typer.Option(spelled, help=help_text, rich_help_panel=panel, show_default=False, **options)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_MODEL, _CACHE, _SCHEDULER = "Model", "KV cache", "Scheduler"
ENGINE_FLAGS = (
    flag("tokenizer", str, _MODEL, "Take the tokenizer from another model."),
    flag("revision", str, _MODEL, "Branch, tag or commit on the hub."),
    flag("dtype", str, _MODEL, "auto (default), float32, bfloat16 or float16."),
    flag("device", str, _MODEL, "auto (default), cpu or cuda."),
    flag("quantization", str, _MODEL, "How weights are kept in memory: int4 or int8, in groups of 32."),
    flag("seed", int, _MODEL, "Where requests without a seed get theirs from; 0."),
    flag("max_model_len", int, _MODEL, "Tokens of a sequence, prompt and output together."),
    flag("attention_backend", str, _MODEL, "auto (default), native, triton or reference."),
    flag(
        "enforce_eager",
        bool,
        _MODEL,
        "On a GPU, launch each kernel anew in place of CUDA graphs.",
        spelled="--enforce-eager/--no-enforce-eager",
    ),
    flag("block_size", int, _CACHE, "Tokens a block holds; 16."),
    flag("kv_cache_memory_bytes", int, _CACHE, "Size of the pool: 512MiB, 2GiB.", parser=parse_bytes, metavar="SIZE"),
    flag("num_gpu_blocks_override", int, _CACHE, "Blocks of the pool, whatever the memory says."),
    flag("gpu_memory_utilization", float, _CACHE, "Share of a GPU's memory to use; 0.9. Not used on a CPU."),
    flag("kv_cache_dtype", str, _CACHE, "auto, bfloat16, float16, float32, fp8_e4m3 or int8_per_token_head."),
    flag(
        "enable_prefix_caching",
        bool,
        _CACHE,
        "Share the blocks of equal prefixes; on.",
        spelled="--enable-prefix-caching/--no-enable-prefix-caching",
    ),
    flag("eviction_policy", str, _CACHE, "Who leaves the prefix cache: lru (default), slru, lfu, gdsf, queue-aware."),
    flag("max_num_seqs", int, _SCHEDULER, "Sequences that run at a time; 128."),
    flag("max_num_batched_tokens", int, _SCHEDULER, "Tokens in one step; 2048."),
    flag(
        "enable_chunked_prefill",
        bool,
        _SCHEDULER,
        "Compute long prompts over several steps; on.",
        spelled="--enable-chunked-prefill/--no-enable-chunked-prefill",
    ),
    flag("scheduling_policy", str, _SCHEDULER, "lpm (default), fcfs or priority."),
    flag("max_num_queued_reqs", int, _SCHEDULER, "Requests that may wait; one more is refused."),
    flag("swap_space", float, _SCHEDULER, "Accepted for old scripts; does nothing.", hidden=True),
    flag(
        "trust_remote_code",
        bool,
        _MODEL,
        "Refused: no foreign code is run.",
        spelled="--trust-remote-code",
        hidden=True,
    ),
)


def with_options(**groups: Sequence[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``verb(..., *, engine)`` under ``@with_options(engine=ENGINE_FLAGS)`` -> the same with every flag of the group
    in the place of ``engine``, which gets a dictionary of those that were given.
    """

    def wrap(verb: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(verb, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name not in groups]

        @functools.wraps(verb)
        def wrapped(*args: Any, **values: Any) -> None:
            values.pop("help_for", None)
            given: dict[str, dict[str, Any]] = {}
            for name, flags in groups.items():
                found = {flag.name: values.pop(flag.name, None) for flag in flags}
                given[name] = {key: value for key, value in found.items() if value not in (None, [])}
            if given.get("engine", {}).pop("swap_space", None) is not None:
                typer.echo("warning: --swap-space does nothing here: preempted sequences are computed again", err=True)
            verb(*args, **values, **given)

        topic = inspect.Parameter("help_for", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=HelpFor)
        parameters = [*own, *(flag for flags in groups.values() for flag in flags), topic]
        wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapped

    return wrap


with_engine_options = with_options(engine=ENGINE_FLAGS)
