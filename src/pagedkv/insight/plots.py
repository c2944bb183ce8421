"""Pictures of what plan and replay compute: PNG and SVG, readable in print and on dark pages.

matplotlib is an optional extra (``pip install "pagedkv[plot]"``) and imported when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedkv.errors import BackendUnavailable
from pagedkv.insight.replay import ReplayReport
from pagedkv.insight.waste import utilization

# Distinguishable in grey and for colour-blind readers (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MOST_TICKS = 8  # labels of seven digits that fit on an axis
GREY = "#808080"  # between black and white: legible on both


def plot_utilization(lengths: Sequence[int], folder: Path, static_slots: int = 1024) -> list[Path]:
    """Utilisation of the slots against the block size from 1 to 128, for sequences of these lengths."""
    sizes = list(range(1, 129))
    figure, axes = _canvas("block size (tokens)", "utilisation of the slots (%)")
    axes.plot(sizes, [100 * utilization(lengths, size) for size in sizes], color=COLOURS[0], label="paged")
    static = 100 * utilization(lengths, static_slots)
    axes.axhline(static, color=COLOURS[1], linestyle="--", label=f"one slot of {static_slots:,} tokens per sequence")
    bound = [100 * sum(lengths) / (sum(lengths) + len(lengths) * (size - 1)) for size in sizes]
    axes.plot(sizes, bound, color=GREY, linestyle=":", label="bound: block size - 1 wasted in every sequence")
    axes.set_ylim(0, 101)
    axes.set_xlim(0, 128)
    axes.set_xticks([1, 16, 32, 64, 96, 128])
    return _save(figure, axes, folder, "utilisation")


def plot_prefix(shared: int, own: int, most_requests: int, block_size: int, folder: Path) -> list[Path]:
    """Prompt tokens computed against the number of requests that share a prefix, with and without the cache.

    The curve with the cache is run, not worked out: a real manager and prefix cache serve the requests.
    """
    from pagedkv.insight.waste import tokens_computed

    counts = list(range(1, most_requests + 1))
    figure, axes = _canvas(f"requests that share {shared} tokens, {own} of their own each", "prompt tokens computed")
    axes.plot(counts, [(shared + own) * n for n in counts], color=COLOURS[1], linestyle="--", label="without sharing")
    computed = tokens_computed(shared, own, most_requests, block_size)
    axes.plot(counts, computed, color=COLOURS[0], label="with the prefix cache")
    axes.set_xlim(1, most_requests)
    axes.set_ylim(bottom=0)
    return _save(figure, axes, folder, "prefix")


def plot_replay(reports: Sequence[ReplayReport], folder: Path) -> list[Path]:
    """Token hit rate against pool size, one line per policy and block size, with the optimum and the limit."""
    limited = [report for report in reports if isinstance(report, ReplayReport) and report.limited]
    if not limited:
        raise BackendUnavailable("there is no curve to draw: every report is of a pool without limit, or timed")
    lines = dict.fromkeys((report.policy, report.block_size) for report in limited)
    sizes = sorted({size for _, size in lines})
    figure, axes = _canvas(f"pool (tokens, in blocks of {' or '.join(map(str, sizes))})", "prompt tokens hit (%)")
    for colour, (policy, size) in zip(COLOURS * len(lines), lines, strict=False):
        points = sorted(
            (r.num_blocks * size, r.token_hit_rate) for r in limited if (r.policy, r.block_size) == (policy, size)
        )
        label = policy if len(sizes) == 1 else f"{policy}, {size}"
        axes.plot([p for p, _ in points], [100 * h for _, h in points], color=colour, marker="o", label=label)
    best = sorted({(r.num_blocks * r.block_size, r.optimum_hit_rate or 0.0) for r in limited})
    axes.plot([p for p, _ in best], [100 * h for _, h in best], color=GREY, linestyle=":", marker=".", label="optimum")
    axes.axhline(100 * (limited[0].infinite_hit_rate or 0.0), color=GREY, linestyle="--", label="without limit")
    axes.set_xscale("log")
    pools = sorted({p for p, _ in best})
    if len(pools) <= MOST_TICKS:
        axes.set_xticks(pools, [f"{p:,}" for p in pools])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    return _save(figure, axes, folder, f"replay-{limited[0].trace}")


def _canvas(x: str, y: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailable('pictures need matplotlib: pip install "pagedkv[plot]"') from error
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x, color=GREY)
    axes.set_ylabel(y, color=GREY)
    axes.tick_params(which="both", colors=GREY)
    axes.grid(color=GREY, alpha=0.25)
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_color(GREY)
    figure.patch.set_alpha(0.0)  # the page shows through, light or dark
    return figure, axes


def _save(figure: Any, axes: Any, folder: Path, name: str) -> list[Path]:
    axes.legend(frameon=False, labelcolor=GREY)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=160)
    # no date and no random ids: the same figures give the same file
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "pagedkv"}):
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
