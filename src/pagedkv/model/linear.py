"""Linear layers over weights that are packed once.

Owns: the product ``x @ weight.T + bias`` and the one copy of its weight, in whatever order the backend wants.
Guarantees: the backends marked *exact* give a row the same bits whatever the number of rows, its place among them
and the number of threads. This is what lets a batched, chunked or cached run equal the lone one bit for bit.

    backend   exact               where
    torch     no                  any device: F.linear over a plain weight, the reference
    native    yes                 CPU, float32 and bfloat16: csrc/product.hpp. Weights of four and eight bits stay
                                  in their bits (bfloat16 only); two to three times oneDNN where few rows are run.
    onednn    from 2 rows up;     x86 processors, float32 and bfloat16: torch's own packed products.
              one row is padded   A row's bits differ when it is alone, so a single row is run as two.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv.attention.native import extension
from pagedkv.errors import BackendUnavailable, UnsupportedModel, WeightError
from pagedkv.model.gguf import QuantisedTensor
from pagedkv.model.groups import GroupedWeight, kind_of
from pagedkv.model.packed import PackedMatrix

BACKENDS = ("native", "onednn", "torch")

Weight = Tensor | QuantisedTensor | GroupedWeight


class Linear(Protocol):
    """``layer(x [T, in_features]) -> [T, out_features]``, both of the layer's dtype."""

    in_features: int
    out_features: int
    nbytes: int  # bytes held: the weight as packed, and the bias
    exact: bool  # a row's bits do not depend on its neighbours or on the number of threads

    def __call__(self, x: Tensor) -> Tensor: ...


class NativeLinear:
    """The packed product of csrc/product.hpp (CPU, float32 or bfloat16)."""

    exact = True

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        plain = "bf16" if dtype == torch.bfloat16 else "f32"
        kind = plain if dtype == torch.float32 else kind_of(weight) or plain
        self._packed = PackedMatrix([weight], kind=kind)
        self._bias = None if bias is None else bias.float().contiguous()
        self._dtype = dtype
        self.in_features, self.out_features = self._packed.in_features, self._packed.out_features
        self.nbytes = self._packed.nbytes + _nbytes(self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self.out_features), dtype=self._dtype)
        return self._packed.multiply(x if x.stride(-1) == 1 else x.contiguous(), out, bias=self._bias)


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


def make_linear(weight: Weight, bias: Tensor | None = None, *, dtype: torch.dtype, backend: str = "auto") -> Linear:
    """Pack ``weight`` [out_features, in_features] (and ``bias`` [out_features]) for ``backend``.

    The layer keeps the only copy it needs: drop the reference to ``weight`` and its memory is returned.

    dtype:   of the activations and, unless it stays in four or eight bits, of the packed weight.
    backend: a name of the table above, or "auto": the first of native, onednn and torch that is here.
    Raises BackendUnavailable for a backend that is not here, WeightError for a weight that is not a matrix or a
    bias of another length.
    """
    if len(weight.shape) != 2:
        raise WeightError(f"a linear layer needs a matrix, not a tensor of shape {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise WeightError(f"bias has shape {tuple(bias.shape)}, but the weight has {weight.shape[0]} rows")
    if not dtype.is_floating_point:
        raise UnsupportedModel(f"a linear layer cannot compute in {dtype}")
    device = weight.device if isinstance(weight, Tensor) else torch.device("cpu")
    missing = {"native": _why_not_native, "onednn": _why_not_onednn, "torch": _nothing}
    if backend == "auto":
        backend = next(name for name, why in missing.items() if why(device, dtype) is None)
    if backend not in missing:
        raise BackendUnavailable(f"product backend {backend!r} does not exist; there are {', '.join(BACKENDS)}")
    reason = missing[backend](device, dtype)
    if reason is not None:
        raise BackendUnavailable(f"product backend {backend!r}: {reason}")
    if backend == "native":
        return NativeLinear(weight, bias, dtype)
    plain = weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize().to(dtype)
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    return OneDnnLinear(plain, bias) if backend == "onednn" else TorchLinear(plain, bias)


def _nothing(_device: torch.device, _dtype: torch.dtype) -> str | None:
    return None


def _why_not_native(device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        extension()
    except BackendUnavailable as error:
        return str(error)
    return _why_not_these(device, dtype)


def _why_not_onednn(device: torch.device, dtype: torch.dtype) -> str | None:
    if not torch._C._has_mkldnn:
        return "this build of torch has no oneDNN"
    return _why_not_these(device, dtype)


def _why_not_these(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"it needs a CPU tensor, this one is on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in float32 or bfloat16, not {dtype}"
    return None


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
