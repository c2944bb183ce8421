"""Weights in the order of csrc/product.hpp, behind one small class: the native product's only copy of a matrix.

Exact: every output is one accumulator that runs over K in order, so a row has the same bits alone and in any batch,
at any number of threads, per instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch  # before the extension: its OpenMP symbols resolve to the runtime that torch has loaded
from torch import Tensor

from pagedkv.attention.native import extension
from pagedkv.errors import InvalidRequest, UnsupportedModel
from pagedkv.model.gguf import QuantisedTensor
from pagedkv.model.groups import GroupedWeight, from_gguf, kind_of, quantise

KINDS = {"f32": 0, "bf16": 1, "int4": 2, "int4_offset": 3, "int8": 4}
_SOURCES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_STRAIGHT, _GATE, _UP = 0, 1, 2
STORE, ADD, SILU_MUL = 0, 1, 2
AT_A_TIME = 1 << 17  # weights that are widened or rounded: temporaries stay in the cache, and malloc keeps few of them

Weight = Tensor | QuantisedTensor | GroupedWeight


class PackedMatrix:
    """One or more matrices [N_i, K] with the same input, packed one after another (or gate and up in turn).

    kind: a key of KINDS; columns: out features as the product sees them; nbytes: of the packed weight.
    """

    def __init__(self, parts: Sequence[Weight], *, kind: str, arena: Any = None, gate_up: bool = False) -> None:
        depth = {int(part.shape[1]) for part in parts}
        if len(depth) != 1:
            raise InvalidRequest(f"matrices of {sorted(depth)} in_features share no input", field="weight")
        native = extension()
        rows = [int(part.shape[0]) for part in parts]
        if gate_up and (len(rows) != 2 or rows[0] != rows[1]):
            raise InvalidRequest(f"gate and up are two matrices of one shape, not of {rows} rows", field="weight")
        self.kind = kind
        self.in_features = depth.pop()
        self.out_features = rows[0] if gate_up else sum(rows)
        self.columns = -(-rows[0] // 16) * 32 if gate_up else sum(rows)
        try:
            self.native = native.PackedWeight(
                arena or native.WeightArena(), KINDS[kind], self.columns, self.in_features
            )
        except ValueError as error:
            raise UnsupportedModel(str(error)) from error
        self.nbytes: int = self.native.nbytes
        first = 0
        for index, part in enumerate(parts):
            place = (_GATE, _UP)[index] if gate_up else _STRAIGHT
            step = rows[index] if self._takes(part) else max(1, AT_A_TIME // self.in_features)
            for start in range(0, rows[index], step):
                stop = min(start + step, rows[index])
                self._put(_rows(part, start, stop), place, start if gate_up else first + start)
            first += rows[index]

    def _takes(self, part: Weight) -> bool:
        """Whether the kernels read ``part`` as it is."""
        return self.kind in ("f32", "bf16") and isinstance(part, Tensor) and part.dtype in _SOURCES

    def _put(self, part: Weight, place: int, first: int) -> None:
        rows = int(part.shape[0])
        if self.kind in ("f32", "bf16"):
            plain = part if isinstance(part, Tensor) else part.dequantize()
            plain = (plain if plain.dtype in _SOURCES else plain.float()).contiguous()
            self.native.put_dense(plain.data_ptr(), _SOURCES[plain.dtype], rows, place, first)
            return
        grouped = as_groups(part, self.kind)
        values, factors, offsets = grouped.values.contiguous(), grouped.factors.contiguous(), grouped.offsets
        offsets = None if offsets is None else offsets.contiguous()
        addresses = (values.data_ptr(), factors.data_ptr(), 0 if offsets is None else offsets.data_ptr())
        self.native.put_groups(addresses, rows, place, first)

    def multiply(self, x: Tensor, out: Tensor, *, bias: Tensor | None = None, tail: int = STORE) -> Tensor:
        """out = tail(x @ weight.T + bias). x [T, K] float32 (kind f32) or bfloat16; rows dense.

        out: bfloat16 or float32 [T, out_features]; tail ADD adds to a float32 out; bias float32 [columns].
        """
        wanted = torch.float32 if self.kind == "f32" else torch.bfloat16
        if x.dtype != wanted or x.dim() != 2 or x.shape[1] != self.in_features or x.stride(1) != 1:
            raise InvalidRequest(
                f"x must be {wanted} [rows, {self.in_features}] with dense rows, not {x.dtype} {tuple(x.shape)}",
                field="x",
            )
        self.native.multiply(
            (x.data_ptr(), x.stride(0), x.shape[0]),
            (out.data_ptr(), out.stride(0), self.out_features, out.dtype == torch.bfloat16),
            0 if bias is None else bias.data_ptr(),
            tail,
            torch.get_num_threads(),
        )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """float32 [n, K]: the weights of out features ``ids`` (int64 [n]), as the product sees them."""
        out = torch.empty((ids.numel(), self.in_features), dtype=torch.float32)
        self.native.read_columns(ids.contiguous().data_ptr(), ids.numel(), out.data_ptr())
        return out


def _rows(part: Weight, start: int, stop: int) -> Weight:
    """Rows [start, stop), which are independent in every format."""
    if isinstance(part, Tensor):
        return part[start:stop]
    if isinstance(part, QuantisedTensor):
        return QuantisedTensor(part.blocks[start:stop], part.ggml_type, (stop - start, *part.shape[1:]))
    offsets = None if part.offsets is None else part.offsets[start:stop]
    return replace(part, values=part.values[start:stop], factors=part.factors[start:stop], offsets=offsets)


def as_groups(weight: Weight, kind: str) -> GroupedWeight:
    """``weight`` in groups of ``kind``: as its file has it where it can, else rounded."""
    if isinstance(weight, GroupedWeight) and weight.kind == kind:
        return weight
    if isinstance(weight, QuantisedTensor) and kind_of(weight) == kind:
        return from_gguf(weight)
    if kind == "int4":
        raise UnsupportedModel("only a GGUF Q4_0 tensor has the kind int4; others are rounded to int4_offset")
    return quantise(weight if isinstance(weight, Tensor) else weight.dequantize(), 8 if kind == "int8" else 4)
