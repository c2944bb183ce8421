"""The decoder of ``decoder.py`` in one native call per forward pass (csrc/decoder.hpp).

Owns: the packed weights (the only copy), the workspace, the rotary table. Same calls, same KV, same place of every
rounding as written in csrc/decoder.hpp: the residual stream is float32, what enters a product is rounded to the dtype.
Exact: a token's hidden state and logits have the same bits whatever it is batched with and at any number of threads.
Not re-entrant: one forward at a time, as the engine does it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.native import POOL_TYPES, extension
from pagedkv.errors import InvalidRequest, UnsupportedModel
from pagedkv.model.config import ModelConfig
from pagedkv.model.decoder import KVStore, Progress
from pagedkv.model.groups import kind_of
from pagedkv.model.layers import RotaryTable
from pagedkv.model.packed import PackedMatrix
from pagedkv.model.weights import LayerWeights, ModelWeights, Weight

QUANTISATIONS = ("int4", "int8", "none")


class NativeDecoder:
    """See ``decoder.Decoder``.

    dtype: bfloat16 or float32, of activations. quantization: None keeps weights of a GGUF file (Q4_0, Q4_1, Q8_0) in
    their bits where the dtype is bfloat16, and others in the dtype; "int4" and "int8" round every matrix to groups of
    32 (with "int4" the embedding and the head keep eight bits); "none" widens everything to the dtype.
    """

    exact = True

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        dtype: torch.dtype = torch.float32,
        quantization: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModel(f"the native decoder computes in float32 or bfloat16, not {dtype}")
        if quantization is not None and quantization not in QUANTISATIONS:
            raise UnsupportedModel(f"quantization {quantization!r} is not known; there are {', '.join(QUANTISATIONS)}")
        if quantization in ("int4", "int8") and dtype != torch.bfloat16:
            raise UnsupportedModel(f"quantization {quantization!r} computes in bfloat16, not {dtype}")
        self.config = config
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._rotary = RotaryTable(config.rope, self.device)
        self._kv: weakref.ref[Any] | None = None
        self._pools: Any = None
        pack = _Packer(weights.nbytes, dtype, quantization, progress)
        embedding = pack.matrix(weights.embedding, inner=False)
        head = embedding if weights.head is None else pack.matrix(weights.head, inner=False)
        shape = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size)
        try:
            self._native = extension().Decoder(
                shape,
                config.rms_norm_eps,
                dtype == torch.bfloat16,
                embedding.native,
                head.native,
                _floats(weights.final_norm),
            )
            for layer, window in zip(weights.layers, config.layer_windows, strict=True):
                self._native.add_layer(pack.matrices(layer), _vectors(config, layer), window or 0)
        except ValueError as error:
            raise UnsupportedModel(str(error)) from error
        self.nbytes = pack.nbytes
        self.kinds = pack.kinds

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVStore, rows: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] after the final norm, of token_ids int64 [T]; their KV is written into ``kv``.

        rows: int64 [R], ascending; then [R, hidden] of these tokens alone comes back, and behind the last layer's KV
        nothing is computed for the others.
        """
        self._rotary.grow(batch.max_seq_len)
        cos, sin = self._rotary.cos, self._rotary.sin
        rows = torch.arange(token_ids.shape[0]) if rows is None else rows
        hidden = torch.empty((rows.shape[0], self.config.hidden_size), dtype=self.dtype)
        tensors = (
            _dense("token_ids", token_ids, torch.int64),
            _dense("positions", batch.positions, torch.int64),
            _dense("slot_mapping", batch.slot_mapping, torch.int64),
            _dense("query_start", batch.query_start, torch.int32),
            _dense("seq_lens", batch.seq_lens, torch.int32),
            _dense("block_table", batch.block_table, torch.int32),
        )
        if token_ids.shape[0] != batch.num_tokens:
            raise InvalidRequest(
                f"{token_ids.shape[0]} token ids, but the batch has {batch.num_tokens}", field="token_ids"
            )
        shape = (token_ids.shape[0], batch.num_seqs, batch.block_table.shape[1], cos.shape[0])
        sizes = (*shape, rows.shape[0], torch.get_num_threads())
        wanted = _dense("rows", rows, torch.int64)
        addresses = (*tensors, cos.data_ptr(), sin.data_ptr(), wanted, hidden.data_ptr())
        try:
            self._native.forward(self._pools_of(kv), addresses, sizes)
        except ValueError as error:
            raise InvalidRequest(str(error), field="batch") from error
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab_size] of hidden [R, hidden]: pass only the rows whose next token is wanted."""
        rows = hidden.contiguous()
        if rows.dtype != self.dtype or rows.dim() != 2 or rows.shape[1] != self.config.hidden_size:
            raise InvalidRequest(f"hidden must be {self.dtype} [rows, {self.config.hidden_size}]", field="hidden")
        out = torch.empty((rows.shape[0], self.config.vocab_size), dtype=torch.float32)
        self._native.logits(rows.data_ptr(), rows.shape[0], out.data_ptr(), torch.get_num_threads())
        return out

    def _pools_of(self, kv: KVStore) -> Any:
        """The addresses and strides of all layers' pools; kept as long as the same store comes."""
        if self._kv is None or self._kv() is not kv:
            first = kv.k_pool[0]
            k = [_pool(pool, scale) for pool, scale in zip(kv.k_pool, kv.k_scale, strict=True)]
            v = [_pool(pool, scale) for pool, scale in zip(kv.v_pool, kv.v_scale, strict=True)]
            shape = (self.config.num_kv_heads, self.config.head_dim)
            for pool in (*kv.k_pool, *kv.v_pool):
                if (pool.shape[1], pool.shape[3]) != shape or pool.dtype != first.dtype or pool.shape != first.shape:
                    raise InvalidRequest(
                        f"a pool is {pool.dtype} {tuple(pool.shape)}, the model has {shape[0]} KV heads of {shape[1]}",
                        field="kv",
                    )
            self._pools = extension().LayerPools(k, v, POOL_TYPES[first.dtype], first.shape[0], first.shape[2])
            self._kv = weakref.ref(kv)
        return self._pools


class _Packer:
    """Packs matrices into one arena, in the order in which a forward pass reads them."""

    def __init__(self, total: int, dtype: torch.dtype, quantization: str | None, progress: Progress | None) -> None:
        self.nbytes = 0
        self.kinds: set[str] = set()
        self._arena = extension().WeightArena()
        self._plain = "bf16" if dtype == torch.bfloat16 else "f32"
        self._quantization = quantization
        self._total, self._done, self._progress = total, 0, progress

    def matrices(self, layer: LayerWeights) -> list[Any]:
        """qkv, o, gate_up and down of a layer, as csrc takes them."""
        packed = (
            self.matrix(layer.q, layer.k, layer.v),
            self.matrix(layer.o),
            self.matrix(layer.gate, layer.up, gate_up=True),
            self.matrix(layer.down),
        )
        return [matrix.native for matrix in packed]

    def matrix(self, *parts: Weight, gate_up: bool = False, inner: bool = True) -> PackedMatrix:
        kind = self._kind(parts, inner)
        packed = PackedMatrix(parts, kind=kind, arena=self._arena, gate_up=gate_up)
        self.nbytes += packed.nbytes
        self.kinds.add(kind)
        if self._progress is not None:
            self._done = min(self._done + sum(part.nbytes for part in parts), self._total)
            self._progress(self._done, self._total)
        return packed

    def _kind(self, parts: Sequence[Weight], inner: bool) -> str:
        if self._quantization == "int4" and inner:
            return "int4_offset"
        if self._quantization in ("int4", "int8"):
            return "int8"
        kinds = {kind_of(part) for part in parts}
        kind = kinds.pop()
        if kind is None or kinds or self._quantization == "none" or self._plain == "f32":
            return self._plain  # parts of different kinds meet at the dtype
        return kind


def _vectors(config: ModelConfig, layer: LayerWeights) -> list[list[float]]:
    """input, post, q and k norm; biases of qkv, o, gate_up and down. An empty list: the layer has none."""
    widths = (config.num_heads * config.head_dim, *(2 * [config.num_kv_heads * config.head_dim]))
    qkv = _joined((layer.q_bias, layer.k_bias, layer.v_bias), widths)
    padded = -(-config.intermediate_size // 16) * 16
    gate, up = (_joined((bias,), (config.intermediate_size,)) for bias in (layer.gate_bias, layer.up_bias))
    gate_up: list[float] = []
    if gate or up:
        both = torch.zeros((2, padded))
        for row, bias in enumerate((gate, up)):
            both[row, : len(bias)] = torch.tensor(bias)
        gate_up = both.view(2, -1, 16).transpose(0, 1).reshape(-1).tolist()
    return [
        _floats(layer.input_norm),
        _floats(layer.post_norm),
        _floats(layer.q_norm),
        _floats(layer.k_norm),
        qkv,
        _floats(layer.o_bias),
        gate_up,
        _floats(layer.down_bias),
    ]


def _joined(parts: Sequence[Tensor | None], widths: Sequence[int]) -> list[float]:
    """Biases one after another, zeros for those that are missing; an empty list where all are."""
    if all(part is None for part in parts):
        return []
    return [x for part, width in zip(parts, widths, strict=True) for x in (_floats(part) or [0.0] * width)]


def _floats(vector: Tensor | None) -> list[float]:
    return [] if vector is None else vector.float().tolist()


def _dense(name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise InvalidRequest(
            f"{name} must be a contiguous {dtype} CPU tensor, not {tensor.dtype} on {tensor.device}", field=name
        )
    return tensor.data_ptr()


def _pool(pool: Tensor, scales: Tensor | None) -> tuple[int, ...]:
    block, head, slot, dim = pool.stride()
    if pool.dtype not in POOL_TYPES or (dim != 1 and pool.shape[3] > 1) or pool.device.type != "cpu":
        raise InvalidRequest(
            f"a pool must be a dense CPU tensor of a type that kernels read, not {pool.dtype}", field="kv"
        )
    if scales is None:
        return pool.data_ptr(), block, head, slot, 0, 0, 0, 0
    return pool.data_ptr(), block, head, slot, scales.data_ptr(), *scales.stride()
