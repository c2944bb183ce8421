from __future__ import annotations

import gc
import weakref

import pytest
import torch

from pagedkv.errors import BackendUnavailable, WeightError
from pagedkv.model.linear import BACKENDS, make_linear

DTYPES = (torch.float32, torch.bfloat16)


def tensors(out_features: int, in_features: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    return weight, bias, x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (37, 77), (1, 1), (130, 576)])
def test_equals_the_float64_product(backend: str, dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight, bias, x = tensors(out_features, in_features, 5, dtype)
    for b in (None, bias):
        layer = make_linear(weight, b, dtype=dtype, backend=backend)
        assert (layer.out_features, layer.in_features) == (out_features, in_features)
        y = layer(x)
        assert y.dtype == dtype
        exact = x.double() @ weight.double().T + (0 if b is None else b.double())
        summands = x.double().abs() @ weight.double().abs().T + 1
        rounding = torch.finfo(dtype).eps * exact.abs()
        assert ((y.double() - exact).abs() <= rounding + 4e-7 * summands).all()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(backend: str, dtype: torch.dtype) -> None:
    weight, bias, x = tensors(100, 96, 40, dtype)
    layer = make_linear(weight, bias, dtype=dtype, backend=backend)
    assert layer.exact
    threads = torch.get_num_threads()
    try:
        whole = layer(x)
        for rows in range(1, 41):
            torch.set_num_threads(1 + rows % 2)
            assert torch.equal(layer(x[:rows]), whole[:rows])
            assert torch.equal(layer(x[40 - rows :]), whole[40 - rows :])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["native", "onednn"])
def test_only_the_packed_weight_stays_in_memory(backend: str) -> None:
    weight, _, _ = tensors(64, 64, 1, torch.bfloat16)
    gone = weakref.ref(weight)
    layer = make_linear(weight, dtype=torch.bfloat16, backend=backend)
    assert layer.nbytes == 64 * 64 * 2
    del weight
    gc.collect()
    assert gone() is None


def test_a_backend_asked_for_by_name_is_never_replaced() -> None:
    weight = torch.zeros(4, 4)
    with pytest.raises(BackendUnavailable, match="'fastest' does not exist"):
        make_linear(weight, dtype=torch.float32, backend="fastest")
    for backend in ("native", "onednn"):
        with pytest.raises(BackendUnavailable, match=f"{backend}.*float16"):
            make_linear(weight, dtype=torch.float16, backend=backend)
    assert not make_linear(weight, dtype=torch.float16).exact


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(WeightError, match=r"\(4,\)"):
        make_linear(torch.zeros(4), dtype=torch.float32)
    with pytest.raises(WeightError, match="3"):
        make_linear(torch.zeros(4, 4), torch.zeros(3), dtype=torch.float32)
