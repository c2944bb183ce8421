"""Weights of four and eight bits in groups of 32, as the packed product takes them.

A group is 32 neighbours of one row (out feature); it shares a factor and, in one kind, an offset, both half floats:

    kind          bits   weight                       what has it
    int4          4      (value - 8) * factor         GGUF Q4_0
    int4_offset   4      value * factor + offset      GGUF Q4_1; ``quantise(weight, 4)``
    int8          8      value * factor               GGUF Q8_0; ``quantise(weight, 8)``

The integers and factors of a file are kept as they are: nothing is rounded again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedkv.errors import UnsupportedModel, WeightError
from pagedkv.model.gguf import QuantisedTensor

GROUP = 32
_HALF_MAX = 65504.0


@dataclass(frozen=True)
class GroupedWeight:
    """values uint8 [N, K] (0..15) or int8 [N, K]; factors float16 [N, K / 32]; offsets the same, or None."""

    kind: str
    values: Tensor
    factors: Tensor
    offsets: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        groups = self.values.view(self.shape[0], -1, GROUP).float() - (8 if self.kind == "int4" else 0)
        wide = groups * self.factors.float()[..., None]
        if self.offsets is not None:
            wide = wide + self.offsets.float()[..., None]
        return wide.view(self.shape)


def kind_of(weight: Tensor | QuantisedTensor | GroupedWeight) -> str | None:
    """The kind that a weight of a file has without rounding, or None for one that has to be widened."""
    if isinstance(weight, GroupedWeight):
        return weight.kind
    if isinstance(weight, QuantisedTensor):
        return {"Q4_0": "int4", "Q4_1": "int4_offset", "Q8_0": "int8"}.get(weight.ggml_type)
    return None


def from_gguf(weight: QuantisedTensor) -> GroupedWeight:
    """Take the blocks of a Q4_0, Q4_1 or Q8_0 matrix apart; its integers and half floats stay what they are."""
    kind = kind_of(weight)
    if kind is None:
        raise UnsupportedModel(f"{weight.ggml_type} has no groups of {GROUP} with one factor each")
    rows = weight.shape[0]
    blocks = weight.blocks.view(rows, weight.shape[1] // GROUP, -1)
    header = 4 if kind == "int4_offset" else 2
    halves = blocks[..., :header].contiguous().view(torch.float16)
    body = blocks[..., header:]
    # the low nibbles are the first half of a group, the high ones the second
    values = body.contiguous().view(torch.int8) if kind == "int8" else torch.cat((body & 15, body >> 4), dim=-1)
    offsets = halves[..., 1].contiguous() if kind == "int4_offset" else None
    return GroupedWeight(kind, values.reshape(rows, -1), halves[..., 0].contiguous(), offsets)


def quantise(weight: Tensor, bits: int) -> GroupedWeight:
    """Round a matrix [N, K] to ``bits`` (4: between the least and the greatest of a group; 8: symmetric).

    Raises UnsupportedModel where K is not a multiple of 32, WeightError for weights that half floats cannot scale.
    """
    if weight.shape[1] % GROUP:
        raise UnsupportedModel(f"in_features is {weight.shape[1]}; weights in groups need a multiple of {GROUP}")
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    if not bool((groups.abs().amax() < _HALF_MAX).item()):
        raise WeightError(f"a weight is not finite or larger than {_HALF_MAX}, the largest half float")
    if bits == 8:
        factors = (groups.abs().amax(-1) / 127).half()
        values = (groups / _nonzero(factors)).round().clamp(-127, 127).to(torch.int8)
        return GroupedWeight("int8", values.reshape(weight.shape), factors, None)
    if bits != 4:
        raise UnsupportedModel(f"weights of {bits} bits are not supported; there are 4 and 8")
    least, greatest = groups.aminmax(dim=-1)
    offsets = least.half()
    factors = ((greatest - offsets.float()) / 15).half()
    values = ((groups - offsets.float()[..., None]) / _nonzero(factors)).round().clamp(0, 15).to(torch.uint8)
    return GroupedWeight("int4_offset", values.reshape(weight.shape), factors, offsets)


def _nonzero(factors: Tensor) -> Tensor:
    """Factors to divide by: a group of equal weights has the factor zero, and any value stands for it."""
    wide = factors.float()
    return torch.where(wide == 0, torch.ones_like(wide), wide)[..., None]
