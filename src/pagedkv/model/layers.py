"""The element-wise parts of a decoder, in torch: norm, rotation, activation.

Guarantees: a row gets the same bits whatever rows stand beside it (exactness needs this of every operation, not only
of attention and products). Norms and rotations are computed in float32 and rounded once to the input's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv.model.rope import RopeConfig

_TABLE_STEP = 1024  # positions by which a rotary table grows
# torch hands slices of this size to one thread each, and vectorises whole groups of 32; what is left over of either
# goes through a scalar routine that rounds differently
_SERIAL, _VECTOR = 32768, 32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467). x [..., width], weight [width]."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), every element by the vector routine: bits do not depend on numel or threads. x is contiguous."""
    if x.device.type != "cpu":
        return F.silu(x)
    flat = x.view(-1)
    spare = -flat.numel() % _VECTOR
    if spare:
        flat = F.pad(flat, (0, spare))
    out = torch.empty_like(flat)
    for start in range(0, flat.numel(), _SERIAL):
        part = slice(start, start + _SERIAL)
        torch.ops.aten.silu.out(flat[part], out=out[part])
    return out[: x.numel()].view(x.shape)


class RotaryTable:
    """cos and sin for every position up to the longest one asked for; grows, never shrinks.

    The angle is the float32 product that transformers forms; its cosine is taken in float64 and rounded, so that the
    table does not depend on how many positions were filled at a time.
    """

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self._inv_freq = rope.inv_freq()
        self._factor = rope.attention_factor
        self._device = device
        self.cos = torch.empty((0, rope.dim // 2), dtype=torch.float32, device=device)
        self.sin = self.cos

    def grow(self, num_positions: int) -> None:
        """Make ``cos`` and ``sin`` (float32 [>= num_positions, dim / 2], contiguous) cover positions below."""
        have = self.cos.shape[0]
        if num_positions <= have:
            return
        end = max(-(-num_positions // _TABLE_STEP) * _TABLE_STEP, 2 * have)
        angles = (torch.arange(have, end).float()[:, None] * self._inv_freq).double()
        for name, values in (("cos", angles.cos()), ("sin", angles.sin())):
            rows = (values.float() * self._factor).to(self._device)
            setattr(self, name, torch.cat((getattr(self, name), rows)))

    def at(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each float32 [T, 1, dim / 2], of ``positions`` (int64 [T], all below num_positions)."""
        self.grow(num_positions)
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of every head. x [T, heads, D]; cos, sin [T, 1, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
