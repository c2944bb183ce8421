"""Norms and rotations of csrc/elementwise.hpp against float64, on every instruction set that the machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

native = pytest.importorskip("pagedkv._native")


@pytest.fixture(params=native.instruction_sets(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.force_instruction_set(request.param)
    yield request.param
    native.force_instruction_set("")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    native.rms_norm(tuple(x.shape), x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), dtype == torch.bfloat16)
    return out


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 80, 576, 1000])
def test_rms_norm_equals_float64(width: int) -> None:
    x, weight = random(5, width), random(width)
    exact = exact_norm(x, weight, 1e-5)
    assert torch.allclose(rms_norm(x, weight, 1e-5, torch.float32).double(), exact, rtol=3e-6, atol=1e-7)
    narrow = rms_norm(x, weight, 1e-5, torch.bfloat16)
    assert ((narrow.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-7).all()


def test_rms_norm_of_zeros_and_of_large_values_is_finite() -> None:
    weight = torch.ones(40)
    assert torch.equal(rms_norm(torch.zeros(1, 40), weight, 1e-5, torch.float32), torch.zeros(1, 40))
    large = rms_norm(torch.full((1, 40), 1e18), weight, 1e-5, torch.float32)
    assert torch.allclose(large, torch.ones(1, 40))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("width", [2, 16, 20, 64, 80, 128])
def test_rotation_equals_float64(width: int, norm: bool) -> None:
    tokens, heads = 3, 4
    x, weight = random(tokens, heads, width), random(width + 1)[1:].contiguous()
    angles = random(tokens, width // 2) * 10
    cos, sin = angles.cos(), angles.sin()
    wide = exact_norm(x, weight, 1e-5) if norm else x.double()
    first, second = wide.chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    exact = torch.cat((first * c - second * s, second * c + first * s), -1)
    native.rotate(
        (tokens, heads, width), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), weight.data_ptr() if norm else 0, 1e-5
    )
    assert torch.allclose(x.double(), exact, rtol=3e-6, atol=3e-6)
