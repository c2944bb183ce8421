"""The element-wise parts: right, and the same bits for a row in every company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagedkv.model.layers import rms_norm, rotate, silu

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 40, 96, 1537])
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_alone_and_in_company(width: int, dtype: torch.dtype) -> None:
    x, weight = random(70, width, dtype=dtype), random(width, dtype=dtype)
    activated, normed = silu(x), rms_norm(x, weight, 1e-5)
    for start, rows in ((0, 1), (3, 1), (69, 1), (10, 2), (1, 33), (0, 69)):
        part = x[start : start + rows].contiguous()
        assert torch.equal(silu(part), activated[start : start + rows])
        assert torch.equal(rms_norm(part, weight, 1e-5), normed[start : start + rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype) -> None:
    tolerance = 2 * torch.finfo(dtype).eps
    x, weight = 3 * random(7, 41, dtype=dtype), random(41, dtype=dtype)
    wide = x.double()
    assert torch.allclose(silu(x).double(), F.silu(wide), rtol=tolerance, atol=tolerance)
    norm = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.allclose(rms_norm(x, weight, 1e-5).double(), norm, rtol=4 * tolerance, atol=tolerance)


def test_rotation_turns_pairs_and_keeps_lengths() -> None:
    x = random(5, 3, 16, dtype=torch.float32)
    angles = random(5, 1, 8, dtype=torch.float32)
    turned = rotate(x, angles.cos(), angles.sin())
    for i in range(8):
        before = torch.complex(x[..., i], x[..., i + 8])
        after = before * torch.exp(1j * angles[..., i])
        assert torch.allclose(torch.complex(turned[..., i], turned[..., i + 8]), after, atol=1e-6)
