"""Linear layers over weights that are packed once.

Owns: the product ``x @ weight.T + bias`` and the one copy of its weight, in whatever order the backend wants.
Guarantees: the backends marked *exact* give a row the same bits whatever the number of rows, its place among them
and the number of threads. This is what lets a batched, chunked or cached run equal the lone one bit for bit.

    backend   exact               where
    torch     no                  any device: F.linear over a plain weight, the reference
    onednn    from 2 rows up;     x86 processors, float32 and bfloat16: torch's own packed products.
              one row is padded   A row's bits differ when it is alone, so a single row is run as two.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv.errors import BackendUnavailable, UnsupportedModel, WeightError

BACKENDS = ("onednn", "torch")


class Quantised(Protocol):
    """A weight kept in the bits of its file (``model/gguf.py: QuantisedTensor``)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dequantize(self) -> Tensor: ...


class Linear(Protocol):
    """``layer(x [T, in_features]) -> [T, out_features]``, both of the layer's dtype."""

    in_features: int
    out_features: int
    nbytes: int  # bytes held: the weight as packed, and the bias
    exact: bool  # a row's bits do not depend on its neighbours or on the number of threads

    def __call__(self, x: Tensor) -> Tensor: ...


class TorchLinear:
    """``F.linear`` over a plain weight [out_features, in_features], on the weight's device."""

    exact = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias
        self.nbytes = _nbytes(weight) + _nbytes(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDnnLinear:
    """oneDNN's product over a weight in oneDNN's own blocked order (CPU, float32 or bfloat16)."""

    exact = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = _nbytes(weight) + _nbytes(bias)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return self._product(x.expand(2, -1).contiguous())[:1]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


def make_linear(
    weight: Tensor | Quantised, bias: Tensor | None = None, *, dtype: torch.dtype, backend: str = "auto"
) -> Linear:
    """Pack ``weight`` [out_features, in_features] (and ``bias`` [out_features]) for ``backend``.

    The layer keeps the only copy it needs: drop the reference to ``weight`` and its memory is returned.

    dtype:   of the activations and of the packed weight; a quantised weight is widened to it.
    backend: a name of the table above, or "auto", the fastest exact one that the weight's device and dtype have,
             else "torch".
    Raises BackendUnavailable for a backend that is not here, WeightError for a weight that is not a matrix or a
    bias of another length.
    """
    if len(weight.shape) != 2:
        raise WeightError(f"a linear layer needs a matrix, not a tensor of shape {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise WeightError(f"bias has shape {tuple(bias.shape)}, but the weight has {weight.shape[0]} rows")
    if not dtype.is_floating_point:
        raise UnsupportedModel(f"a linear layer cannot compute in {dtype}")
    plain = weight if isinstance(weight, Tensor) else weight.dequantize()
    plain = plain.to(dtype)
    bias = None if bias is None else bias.to(device=plain.device, dtype=dtype)
    missing = _why_not_onednn(plain)
    if backend == "auto":
        backend = "torch" if missing else "onednn"
    if backend == "torch":
        return TorchLinear(plain, bias)
    if backend == "onednn":
        if missing:
            raise BackendUnavailable(f"product backend 'onednn': {missing}")
        return OneDnnLinear(plain, bias)
    raise BackendUnavailable(f"product backend {backend!r} does not exist; there are {', '.join(BACKENDS)}")


def _why_not_onednn(weight: Tensor) -> str | None:
    if weight.device.type != "cpu":
        return f"it needs a CPU tensor, this one is on {weight.device}"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in float32 or bfloat16, not {weight.dtype}"
    if not torch._C._has_mkldnn:
        return "this build of torch has no oneDNN"
    return None


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
