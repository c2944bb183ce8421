"""Waste and sharing in figures, and pictures that are files with something in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.errors import BackendUnavailable
from pagedkv.insight.plots import plot_prefix, plot_replay, plot_utilization
from pagedkv.insight.replay import replay_sequential
from pagedkv.insight.trace import Trace, TraceRequest
from pagedkv.insight.waste import chapter_lengths, slots, tokens_computed, utilization


def test_the_chapters_lengths_and_their_utilisation() -> None:
    lengths = chapter_lengths()
    assert (len(lengths), sum(lengths), slots(lengths, 16)) == (32, 9924, 10144)
    assert round(utilization(lengths, 16), 3) == 0.978
    assert round(sum(lengths) / (32 * 1024), 3) == 0.303


@pytest.mark.parametrize("block_size", [1, 2, 16, 100, 128])
def test_waste_is_at_most_block_size_minus_one_in_each_sequence(block_size: int) -> None:
    lengths = chapter_lengths()
    assert 0 <= slots(lengths, block_size) - sum(lengths) <= len(lengths) * (block_size - 1)


def test_sharing_is_what_the_chapter_counts() -> None:
    assert tokens_computed(96, 8, 8, 16)[-1] == 160
    assert tokens_computed(96, 8, 1, 16) == [104]
    assert tokens_computed(0, 8, 3, 16) == [8, 16, 24]


def same_twice(draw: object) -> list[bytes]:
    first = [path.read_bytes() for path in draw()]  # type: ignore[operator]
    assert [path.read_bytes() for path in draw()] == first  # type: ignore[operator]
    return first


def test_pictures_are_png_and_svg_and_the_same_every_time(tmp_path: Path) -> None:
    for draw in (
        lambda: plot_utilization([20, 300, 499], tmp_path),
        lambda: plot_prefix(96, 8, 4, 16, tmp_path),
    ):
        png, svg = same_twice(draw)
        assert png.startswith(b"\x89PNG")
        assert b"<svg" in svg


def test_replay_curves(tmp_path: Path) -> None:
    trace = Trace("t", 4, [TraceRequest(float(i), 12, 1, [i % 3, 10 + i, 20 + i]) for i in range(20)])
    reports = [replay_sequential(trace, num_blocks=n, policy=p) for n in (4, 8) for p in ("lru", "slru")]
    paths = plot_replay(reports, tmp_path)
    assert [path.name for path in paths] == ["replay-t.png", "replay-t.svg"]
    with pytest.raises(BackendUnavailable, match="no curve"):
        plot_replay([replay_sequential(trace)], tmp_path)
