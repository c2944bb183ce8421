"""Row-wise passes against torch's own operations, on rows of every shape; and a row has the same bits alone."""

from __future__ import annotations

import math

import pytest
import torch

from pagedkv.engine.rowwise import CHUNK, drop_below, largest, normaliser, num_above, weigh

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def some_logits(num_rows: int, num_ids: int, device: str) -> torch.Tensor:
    """A view with a stride that is not its width, as a vocabulary that is cut off has."""
    values = torch.randn(num_rows, num_ids + 3, generator=torch.Generator().manual_seed(num_ids)) * 6
    values[:, num_ids // 2] = -math.inf
    return values.to(device)[:, :num_ids]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_ids", [1, 2, 255, 256, 257, 5003])
def test_values_are_torchs(num_ids: int, device: str) -> None:
    logits = some_logits(5, num_ids, device)
    logits[:, 0] = 1.5
    best, ids = largest(logits)
    assert torch.equal(best, logits.amax(-1))
    assert torch.equal(ids, logits.argmax(-1))
    inverse = torch.tensor([0.1, 0.5, 1.0, 3.0, 1e5], device=device)
    weights = weigh(logits, best, inverse)
    exact = ((logits - best.unsqueeze(1)).double() * inverse.unsqueeze(1)).exp()
    assert weights.shape == (5, -(-num_ids // CHUNK) * CHUNK)
    assert not weights[:, num_ids:].any()
    torch.testing.assert_close(weights[:, :num_ids].double(), exact, rtol=2e-5, atol=1e-30)
    torch.testing.assert_close(normaliser(logits), logits.logsumexp(-1, keepdim=True), rtol=1e-6, atol=1e-6)
    middle = logits[:, num_ids // 3].unsqueeze(1).clamp(min=-9.0)
    assert num_above(logits, middle) == (logits > middle).sum(-1).tolist()
    expected = weights[:, :num_ids] * (logits >= middle)
    drop_below(weights, logits, middle.squeeze(1))
    assert torch.equal(weights[:, :num_ids], expected)


@pytest.mark.parametrize("num_ids", [7, 256, 5003, 40_000])
def test_a_row_has_the_same_bits_alone(num_ids: int) -> None:
    logits = some_logits(6, num_ids, "cpu")
    logits[:, 0] = 0.0
    best, _ = largest(logits)
    inverse = torch.linspace(0.2, 2.0, 6)
    weights, totals = weigh(logits, best, inverse), normaliser(logits)
    for i in range(6):
        one = logits[i : i + 1].clone()
        assert torch.equal(weigh(one, best[i : i + 1], inverse[i : i + 1])[0], weights[i])
        assert torch.equal(normaliser(one)[0], totals[i])


def test_nan_and_infinity_show_in_the_largest() -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0], [-math.inf] * 3, [0.0, math.inf, 1.0]])
    best, _ = largest(logits)
    assert math.isnan(best[0])
    assert best[1:].tolist() == [-math.inf, math.inf]
