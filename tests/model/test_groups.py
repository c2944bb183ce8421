from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from pagedkv.errors import UnsupportedModel, WeightError
from pagedkv.model.gguf import QuantisedTensor
from pagedkv.model.groups import from_gguf, kind_of, quantise


def matrix(rows: int = 7, columns: int = 96) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize(("name", "kind"), [("Q4_0", "int4"), ("Q4_1", "int4_offset"), ("Q8_0", "int8")])
def test_a_gguf_tensor_keeps_its_bits(name: str, kind: str) -> None:
    blocks = quants.quantize(matrix().numpy(), GGMLQuantizationType[name])
    tensor = QuantisedTensor(torch.from_numpy(blocks), name, (7, 96))
    grouped = from_gguf(tensor)
    assert kind_of(tensor) == grouped.kind == kind
    assert grouped.shape == (7, 96)
    # llama.cpp's own package, which computes value * factor + offset in float32 as well
    assert torch.equal(grouped.dequantize(), tensor.dequantize())
    stored = np.frombuffer(blocks.tobytes(), dtype=np.uint8).size
    kept = grouped.values.numel() * (8 if kind == "int8" else 4) // 8 + 2 * grouped.factors.numel()
    assert stored == kept + (0 if grouped.offsets is None else 2 * grouped.offsets.numel())


def test_other_gguf_types_have_no_such_groups() -> None:
    tensor = QuantisedTensor(torch.zeros((1, 144), dtype=torch.uint8), "Q4_K", (1, 256))
    assert kind_of(tensor) is None
    with pytest.raises(UnsupportedModel, match="Q4_K"):
        from_gguf(tensor)


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 127)])
def test_rounding_is_at_most_half_a_step(bits: int, steps: int) -> None:
    weight = matrix(64, 320)
    grouped = quantise(weight, bits)
    groups = weight.view(64, -1, 32)
    span = groups.amax(-1) - groups.amin(-1) if bits == 4 else groups.abs().amax(-1)
    error = (grouped.dequantize() - weight).view(64, -1, 32).abs().amax(-1)
    assert (error <= span / steps * 0.5 + span * 2**-9).all()  # half floats of the factor and the offset
    assert kind_of(grouped) == ("int4_offset" if bits == 4 else "int8")


@pytest.mark.parametrize("bits", [4, 8])
def test_a_constant_group_and_a_group_of_zeros_are_exact(bits: int) -> None:
    weight = torch.zeros((2, 64))
    weight[1] = 0.5
    grouped = quantise(weight, bits)
    assert torch.equal(grouped.dequantize()[0], weight[0])
    assert (grouped.dequantize() - weight).abs().max() < 1e-3
    assert not grouped.dequantize().isnan().any()


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="48"):
        quantise(torch.zeros((2, 48)), 8)
    with pytest.raises(UnsupportedModel, match="3 bits"):
        quantise(torch.zeros((2, 32)), 3)
    for bad in (float("nan"), float("inf"), 1e5):
        with pytest.raises(WeightError, match="65504"):
            quantise(torch.full((2, 32), bad), 8)
