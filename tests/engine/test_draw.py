"""The inverse of the cumulative distribution, at the chances where rounding could step over its borders."""

from __future__ import annotations

import numpy as np
import torch

from pagedkv.engine.draw import draw
from pagedkv.engine.rowwise import CHUNK

LAST = 1 - 2.0**-53


def test_the_first_and_the_last_chance_hit_an_id_with_weight() -> None:
    for where in ([0], [5], [CHUNK - 1], [CHUNK], [3 * CHUNK - 1], [7, 9], [CHUNK + 3, 2 * CHUNK + 8]):
        weights = torch.zeros(2, 3 * CHUNK)
        weights[:, where] = 0.3
        ids = draw(weights, torch.tensor([0.0, LAST], dtype=torch.float64)).tolist()
        assert ids == [where[0], where[-1]]


def test_a_chunk_that_is_lighter_than_the_rounding_of_the_sum() -> None:
    """The target is the border itself, and the step across it is larger than the chunk: its share is below 0."""
    weights = torch.zeros(1, 2 * CHUNK)
    weights[0, 3], weights[0, CHUNK + 7] = 1.0, 1.5e-16
    assert draw(weights, torch.tensor([LAST], dtype=torch.float64)).tolist() == [CHUNK + 7]


def test_no_chance_hits_an_id_without_weight() -> None:
    """Weights over thirty orders of magnitude with gaps at every chunk's ends; chances on and beside all borders."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        row = torch.randn(4, CHUNK, generator=generator).mul(12).exp()
        row[:, :9] = row[:, -9:] = 0.0
        row[torch.rand(4, CHUNK, generator=generator) < 0.5] = 0.0
        reached = row.sum(-1).double().cumsum(-1)
        border = (reached / reached[-1]).numpy()
        inner = row[1].double().cumsum(-1) / row[1].double().sum() * (border[1] - border[0]) + border[0]
        exact = np.concatenate([border, inner.numpy(), np.linspace(0, 1, 300)])
        chances = np.concatenate([exact, np.nextafter(exact, 0), np.nextafter(exact, 1)]).clip(0, LAST)
        weights = row.flatten().expand(len(chances), -1)
        ids = draw(weights, torch.from_numpy(chances))
        assert (weights.gather(1, ids.unsqueeze(1)) > 0).all()


def test_ids_follow_the_cumulative_sum() -> None:
    weights = torch.rand(1, 2 * CHUNK, generator=torch.Generator().manual_seed(1))
    chances = torch.linspace(0, LAST, 1000, dtype=torch.float64)
    reached = weights[0].double().cumsum(-1) / weights.double().sum()
    expected = torch.searchsorted(reached, chances, right=True)
    found = draw(weights.expand(1000, -1), chances)
    near = (reached.unsqueeze(0) - chances.unsqueeze(1)).abs().min(-1).values < 1e-6
    assert torch.equal(found[~near], expected[~near])
    assert near.sum() < 5
